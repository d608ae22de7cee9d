# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""On paper: memory and communication of each way to train on several devices, by formulas for rings.

    PYTHONPATH=benchmarks python benchmarks/studies/ring.py [--ranks 8 64 512 4096]
        [--size 1 7 30 70] [--within 200] [--between 200 25] [--latency 5]

Adam at O2 or O5, parameters gathered and gradients reduced in 16 bits. A ring of d ranks passes a tensor on in d - 1
hops, twice for an all-reduce, with 1/d of it in each. Over several nodes it passes through one after another, in as
many parallel rings as a node has network cards: as fast as these together, or as a link within the node if that is
slower. Collectives come one after another, and nothing is subtracted for what forward and backward overlap with them.
Activations, and the few numbers by which ranks agree on overflow, are left out.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass

from apex_npu.distributed.buckets import MAX_BUCKET_NBYTES, plan_buckets

# Passes over the ring.
PASSES = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1}
# Bytes of a parameter: gathered or reduced; a float32 master with its gradient and two moments.
LOW, FULL = 2, 16
# Layers, each a unit of fully_shard, of models of so many G parameters; matrices of a layer.
LAYERS = {1: 24, 7: 32, 30: 60, 70: 80}
MATRICES = 7
# That of DistributedDataParallel, by default.
TORCH_BUCKET_NBYTES = 25 * 2**20


@dataclass(frozen=True)
class Cluster:
    """Ranks, ``node`` of them on one machine, bytes/s of a device within it and of a node's network cards, seconds."""

    ranks: int
    node: int = 8
    within: float = 200e9
    between: float = 200e9
    latency: float = 5e-6

    @property
    def nodes(self) -> int:
        return max(1, self.ranks // self.node)


@dataclass(frozen=True)
class Collectives:
    """``calls`` collectives over ``ranks`` ranks, on tensors of ``nbytes`` in all, counted whole.

    Attributes:
        rings: How many of them take turns on a node's network cards: 1 for a ring through all ranks, as many as a node
            has devices where each has a ring to its peers on the other nodes, 0 within a node.
    """

    kind: str
    ranks: int
    nbytes: float
    calls: int
    rings: int

    def sent(self) -> float:
        """Bytes that each rank sends."""
        return PASSES[self.kind] * (self.ranks - 1) / self.ranks * self.nbytes

    def hops(self) -> int:
        return PASSES[self.kind] * (self.ranks - 1) * self.calls

    def seconds(self, cluster: Cluster) -> float:
        network = cluster.between / self.rings if self.rings else cluster.within
        return self.sent() / min(cluster.within, network) + self.hops() * cluster.latency


@dataclass(frozen=True)
class Plan:
    """What an iteration takes of each rank.

    Attributes:
        kept: Bytes between forward and backward, with gradients of the step before.
        at_work: Bytes that are added at most during forward and backward.
    """

    kept: float
    at_work: float
    collectives: tuple[Collectives, ...]

    def held(self) -> float:
        return self.kept + self.at_work

    def sent(self) -> float:
        return sum(c.sent() for c in self.collectives)

    def seconds(self, cluster: Cluster) -> float:
        return sum(c.seconds(cluster) for c in self.collectives)


def replicated(bucket_nbytes: int) -> Callable[[float, int, Cluster], Plan]:
    """Every rank has everything; gradients are averaged in buckets, which are closed at ``bucket_nbytes``."""

    def plan(params: float, units: int, cluster: Cluster) -> Plan:
        nbytes = LOW * params
        count = MATRICES * units
        buckets = len(plan_buckets([int(nbytes / count)] * count, bucket_nbytes))
        reduced = Collectives("all_reduce", cluster.ranks, nbytes, buckets, 1 if cluster.nodes > 1 else 0)
        return Plan((2 * LOW + FULL) * params, 0.0, (reduced,))

    return plan


def sharded(*, reshard: bool, hybrid: bool = False) -> Callable[[float, int, Cluster], Plan]:
    """Every rank of all, or of a node, has a part; parameters are gathered again in backward if ``reshard``.

    Two units are at work: while one computes, another is gathered, or its gradients are reduced.
    """

    def plan(params: float, units: int, cluster: Cluster) -> Plan:
        nbytes = LOW * params
        parts = min(cluster.node, cluster.ranks) if hybrid else cluster.ranks
        rings = 1 if parts > cluster.node else 0
        gathers = 2 if reshard else 1
        collectives = [
            Collectives("all_gather", parts, gathers * nbytes, gathers * units, rings),
            Collectives("reduce_scatter", parts, nbytes, units, rings),
        ]
        if parts < cluster.ranks:
            collectives.append(Collectives("all_reduce", cluster.nodes, nbytes / parts, units, cluster.node))
        kept = FULL * params / parts + (0.0 if reshard else nbytes)
        two_units = 2 * nbytes / units
        return Plan(kept, two_units * gathers, tuple(collectives))

    return plan


ENGINES = {
    "DistributedDataParallel": replicated(TORCH_BUCKET_NBYTES),
    "combine_ddp": replicated(MAX_BUCKET_NBYTES),
    "fully_shard, reshard_after_forward=False": sharded(reshard=False),
    "fully_shard, reshard_after_forward=True": sharded(reshard=True),
    "hybrid, reshard_after_forward=True": sharded(reshard=True, hybrid=True),
}


def table(sizes: list[int], clusters: list[list[Cluster]]) -> list[str]:
    """Lines of Markdown; each row of ``clusters`` has the same ranks, and one link for each column of times."""
    links = "".join(f" s at {c.between / 1e9:.0f} GB/s |" for c in clusters[0])
    lines = [f"| G parameters | ranks | | GB held | GB sent |{links}", "|---" * (5 + len(clusters[0])) + "|"]
    for size in sizes:
        for same in clusters:
            for name, engine in ENGINES.items():
                plans = [engine(size * 1e9, LAYERS[size], cluster) for cluster in same]
                if name.startswith("hybrid") and same[0].nodes == 1:
                    continue
                numbers = [f"{plans[0].held() / 1e9:,.1f}", f"{plans[0].sent() / 1e9:,.1f}"]
                numbers += [f"{plan.seconds(cluster):,.2f}" for plan, cluster in zip(plans, same, strict=True)]
                lines.append(f"| {size} | {same[0].ranks:,} | {name} | {' | '.join(numbers)} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 64, 512, 4096])
    parser.add_argument("--size", type=int, nargs="+", default=list(LAYERS), choices=LAYERS, help="G parameters")
    parser.add_argument("--node", type=int, default=8, help="devices of a node")
    parser.add_argument("--within", type=float, default=200.0, help="GB/s that a device sends within its node")
    parser.add_argument("--between", type=float, nargs="+", default=[200.0, 25.0], help="GB/s that a node sends")
    parser.add_argument("--latency", type=float, default=5.0, help="µs of a hop")
    o = parser.parse_args()
    if bad := [ranks for ranks in o.ranks if ranks > o.node and ranks % o.node]:
        parser.error(f"--ranks: {bad[0]} are not whole nodes of {o.node}")
    clusters = [
        [Cluster(ranks, o.node, o.within * 1e9, between * 1e9, o.latency * 1e-6) for between in o.between]
        for ranks in o.ranks
    ]
    print("\n".join(table(o.size, clusters)))


if __name__ == "__main__":
    main()
