# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""O1 together with the rest of torch: kinds of modules and of data, losses, linear algebra, torch.func, workers.

The reference is the same computation with the casts off, in float32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from devices import DEVICE, needs, require
from small_programs import backward
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize
from torch.nn.utils.rnn import pack_padded_sequence
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset

from apex_npu import amp

HALF, BF16, FLOAT, DOUBLE = torch.float16, torch.bfloat16, torch.float32, torch.float64
ON_CPU = DEVICE.type == "cpu"


def converted(model: nn.Module, *optimizers: torch.optim.Optimizer) -> Any:
    amp.initialize(model.to(DEVICE), list(optimizers), opt_level="O1", verbosity=0)
    return model


def o1() -> None:
    converted(nn.Linear(1, 1))


def rand(*shape: int, dtype: torch.dtype = FLOAT) -> Tensor:
    # Exact in half, so that explicit casts lose nothing.
    return (torch.rand(*shape).mul(8).round() / 16 + 0.25).to(DEVICE, dtype)


def assert_near(result: Tensor, reference: Tensor) -> None:
    """Equal as far as half's 11 bits go through a few layers."""
    torch.testing.assert_close(result.float(), reference.float(), rtol=2e-2, atol=5e-3)


def gradients(model: nn.Module, run: Callable[[], Tensor]) -> list[Tensor]:
    model.zero_grad()
    run().float().square().mean().backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


# ----------------------------------------------------------------------------------------------------- parametrizations


def orthogonal(orthogonal_map: str, **options: Any) -> Callable[[nn.Module], nn.Module]:
    return lambda layer: parametrizations.orthogonal(layer, orthogonal_map=orthogonal_map, **options)


def chained(*steps: Callable[[nn.Module], nn.Module]) -> Callable[[nn.Module], nn.Module]:
    def apply(layer: nn.Module) -> nn.Module:
        for step in steps:
            layer = step(layer)
        return layer

    return apply


PARAMETRIZED: dict[str, Callable[[nn.Module], nn.Module]] = {
    **{f"orthogonal, {name}": orthogonal(name) for name in ("matrix_exp", "cayley", "householder")},
    **{
        f"orthogonal, {name}, plain": orthogonal(name, use_trivialization=False)
        for name in ("matrix_exp", "cayley", "householder")
    },
    "spectral_norm": parametrizations.spectral_norm,
    "weight_norm": parametrizations.weight_norm,
    # The second step gets the first one's half weight: torch multiplies with what the weight was at the start.
    **{
        f"orthogonal, then {name}": chained(orthogonal("matrix_exp"), orthogonal(name, use_trivialization=False))
        for name in ("matrix_exp", "cayley", "householder")
    },
    **{
        f"{name}, spectral_norm": chained(orthogonal(name, use_trivialization=False), parametrizations.spectral_norm)
        for name in ("matrix_exp", "cayley", "householder")
    },
}


@pytest.mark.parametrize("shape", [(6, 6), (6, 4), (4, 6)], ids=str)
@pytest.mark.parametrize("name", PARAMETRIZED)
def test_parametrized_weights_train(name: str, shape: tuple[int, int]) -> None:
    model = nn.Sequential(PARAMETRIZED[name](nn.Linear(*shape)), nn.Tanh())
    optimizer = torch.optim.SGD(model.to(DEVICE).parameters(), lr=0.5)
    converted(model, optimizer)
    x = rand(3, shape[0])
    for step in range(4):
        if step % 2:
            with torch.no_grad():
                model.eval()(x)
            model.train()
        # spectral_norm moves its vectors in each forward of training: both runs start from the same.
        buffers = {key: value.clone() for key, value in model.named_buffers()}
        with amp.disable_casts():
            expected = gradients(model, lambda: model(x))
        model.load_state_dict(buffers, strict=False)
        got = gradients(model, lambda: model(x))
        for a, b in zip(got, expected, strict=True):
            assert a.dtype == FLOAT
            torch.testing.assert_close(a, b, rtol=5e-2, atol=5e-3)
        optimizer.zero_grad()
        backward(model(x).float().square().mean(), optimizer)
        optimizer.step()


def test_a_cached_parametrization_is_shared_by_the_forwards_of_its_block() -> None:
    model = converted(parametrizations.orthogonal(nn.Linear(6, 6)))
    x = rand(3, 6)
    with parametrize.cached():
        got = gradients(model, lambda: model(x) + model(x))
    with amp.disable_casts():
        expected = gradients(model, lambda: model(x) + model(x))
    torch.testing.assert_close(got, expected, rtol=5e-2, atol=5e-3)


# ------------------------------------------------------------------------------------------------------- linear algebra

SQUARE = torch.tensor([[4.0, 1.0, 0.5], [0.5, 3.0, 1.0], [1.0, 0.25, 5.0]])
SYMMETRIC = torch.tensor([[4.0, 1.0, 0.5], [1.0, 3.0, 0.25], [0.5, 0.25, 5.0]])
LINALG: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "inv": lambda a, s: torch.linalg.inv(a),
    "inverse": lambda a, s: torch.inverse(a),
    "matrix_exp": lambda a, s: torch.matrix_exp(a / 4),
    "solve": lambda a, s: torch.linalg.solve(a, s),
    "solve_triangular": lambda a, s: torch.linalg.solve_triangular(a.triu(), s, upper=True),
    "qr": lambda a, s: torch.linalg.qr(a).Q.abs(),
    "svd": lambda a, s: torch.linalg.svd(a).S,
    "svdvals": lambda a, s: torch.linalg.svdvals(a),
    "eigh": lambda a, s: torch.linalg.eigh(s).eigenvalues,
    "eigvalsh": lambda a, s: torch.linalg.eigvalsh(s),
    "eigvals": lambda a, s: torch.linalg.eigvals(s).real.sort().values,
    "cholesky": lambda a, s: torch.linalg.cholesky(s),
    "cholesky_solve": lambda a, s: torch.cholesky_solve(a, torch.linalg.cholesky(s)),
    "cholesky_inverse": lambda a, s: torch.cholesky_inverse(s),
    "det": lambda a, s: torch.linalg.det(a),
    "torch.det": lambda a, s: torch.det(a),
    "slogdet": lambda a, s: torch.linalg.slogdet(a).logabsdet,
    "logdet": lambda a, s: torch.logdet(a),
    "pinv": lambda a, s: torch.linalg.pinv(a),
    "pinverse": lambda a, s: torch.pinverse(a),
    "lstsq": lambda a, s: torch.linalg.lstsq(a, s).solution,
    "lu": lambda a, s: torch.linalg.lu(a).U,
    "lu_factor": lambda a, s: torch.linalg.lu_factor(a).LU,
    "cond": lambda a, s: torch.linalg.cond(a),
    "norm, 2": lambda a, s: torch.linalg.norm(a, 2),
    "norm, nuc": lambda a, s: torch.linalg.norm(a, "nuc"),
    "matrix_norm": lambda a, s: torch.linalg.matrix_norm(a),
    "householder_product": lambda a, s: torch.linalg.householder_product(a.tril(-1), s[0] / 4),
}
if hasattr(torch.linalg, "polar"):  # torch 2.14 and newer
    LINALG["matrix_sqrth"] = lambda a, s: torch.linalg.matrix_sqrth(s)
    LINALG["polar"] = lambda a, s: torch.linalg.polar(a)[0]


@pytest.mark.parametrize(
    ("level", "given"),
    [
        *(("O1", given) for given in ((HALF, HALF), (FLOAT, FLOAT), (HALF, FLOAT), (FLOAT, HALF))),
        ("O4", (torch.bfloat16, torch.bfloat16)),
    ],
    ids=str,
)
@pytest.mark.parametrize("name", LINALG)
def test_decompositions_and_solvers_run_in_float(name: str, level: str, given: tuple[torch.dtype, torch.dtype]) -> None:
    amp.initialize(nn.Linear(1, 1).to(DEVICE), opt_level=level, verbosity=0)
    result = LINALG[name](SQUARE.to(DEVICE, given[0]), SYMMETRIC.to(DEVICE, given[1]))
    assert result.dtype == FLOAT
    torch.testing.assert_close(
        result.cpu(), LINALG[name](SQUARE.double(), SYMMETRIC.double()).float(), rtol=1e-5, atol=1e-5
    )


def test_matrix_rank_of_half() -> None:
    o1()
    assert torch.linalg.matrix_rank(SQUARE.to(DEVICE, HALF)).item() == 3


# ------------------------------------------------------------------------------------------- attention and transformers


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("mask", [None, "float", "bool"])
def test_multihead_attention_in_all_its_ways(training: bool, need_weights: bool, mask: str | None) -> None:
    model = converted(nn.MultiheadAttention(8, 2, batch_first=True)).train(training)
    x = rand(2, 3, 8)
    masks = {
        None: None,
        "float": torch.zeros(3, 3, device=DEVICE),
        "bool": torch.tensor([[False, False, True]] * 3, device=DEVICE),
    }
    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            result = model(x, x, x, need_weights=need_weights, attn_mask=masks[mask])[0]
            with amp.disable_casts():
                expected = model(x, x, x, need_weights=need_weights, attn_mask=masks[mask])[0]
        assert result.dtype == HALF
        assert_near(result, expected)


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode, torch.enable_grad])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize(("nested", "norm_first"), [(False, False), (False, True), (True, False)])
def test_transformers_in_eval(context: Callable[[], Any], padded: bool, nested: bool, norm_first: bool) -> None:
    if nested and not ON_CPU:
        pytest.skip("the simulated device has no nested tensors")
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True, norm_first=norm_first)
    model = converted(nn.TransformerEncoder(layer, 2, enable_nested_tensor=nested)).eval()
    mask = torch.tensor([[False, False, True], [False, False, False]], device=DEVICE) if padded else None
    x = rand(2, 3, 8)
    with context():
        result = model(x, src_key_padding_mask=mask)
        with amp.disable_casts():
            expected = model(x, src_key_padding_mask=mask)
        of_half = model(x.half(), src_key_padding_mask=mask)
    keep = torch.ones(2, 3, dtype=torch.bool) if mask is None else ~mask.cpu()  # padding is anything
    for found in (result, of_half):
        assert_near(found.cpu()[keep], expected.cpu()[keep])


@pytest.mark.parametrize("query", [FLOAT, HALF], ids=str)
@pytest.mark.parametrize("mask", [None, FLOAT, HALF, torch.bool], ids=str)
def test_scaled_dot_product_attention_gives_half(query: torch.dtype, mask: torch.dtype | None) -> None:
    o1()
    q, k, v = rand(2, 2, 4, 8, dtype=query).requires_grad_(), rand(2, 2, 4, 8), rand(2, 2, 4, 8, dtype=HALF)
    given = None if mask is None else torch.ones(4, 4, device=DEVICE).tril().to(mask)
    result = F.scaled_dot_product_attention(q, k, v, attn_mask=given)
    result.float().sum().backward()
    assert q.grad is not None
    assert (result.dtype, q.grad.dtype) == (HALF, query)
    with amp.disable_casts():
        given = given if given is None or mask == torch.bool else given.float()
        assert_near(result, F.scaled_dot_product_attention(q.float(), k, v.float(), attn_mask=given))


# -------------------------------------------------------------------------------------------------------- other modules


RNNS: dict[str, Any] = {
    "relu": lambda: nn.RNN(4, 5, num_layers=2, nonlinearity="relu"),
    "tanh": lambda: nn.RNN(4, 5, bidirectional=True),
    "GRU": lambda: nn.GRU(4, 5, num_layers=2, bidirectional=True),
    "LSTM": lambda: nn.LSTM(4, 5, num_layers=2),
    "LSTM, projection": lambda: nn.LSTM(4, 5, num_layers=2, bidirectional=True, proj_size=3),
}


@pytest.mark.parametrize("grad", [True, False], ids=["grad", "no_grad"])
@pytest.mark.parametrize("dtype", [HALF, FLOAT], ids=str)
@pytest.mark.parametrize("given", ["alone", "unbatched", "state", "packed"])
@pytest.mark.parametrize("kind", RNNS)
def test_rnns_give_half(kind: str, given: str, dtype: torch.dtype, grad: bool) -> None:
    if "projection" in kind:
        require("lstm_projection")
    if given == "packed" and "LSTM" not in kind:
        require("packed_rnn")
    model = converted(RNNS[kind]())
    x = (rand(3, 4) if given == "unbatched" else rand(3, 2, 4)).to(dtype).requires_grad_(grad)

    def outputs(x: Tensor) -> tuple[Tensor, list[Tensor]]:
        """What the model gives, and the gradients of ``x`` and of the weights."""
        options = (model(x)[1],) if given == "state" else ()
        output = model(pack_padded_sequence(x, torch.tensor([3, 2])) if given == "packed" else x, *options)[0]
        output = output.data if given == "packed" else output
        wanted = [x, *model.parameters()] if grad else []
        return output, list(torch.autograd.grad(output.float().square().sum(), wanted)) if wanted else []

    with torch.set_grad_enabled(grad):
        output, grads = outputs(x)
        with amp.disable_casts():
            expected, expected_grads = outputs(x.float())
    assert output.dtype == HALF
    assert [g.dtype for g in grads] == [dtype, *[FLOAT] * (len(grads) - 1)][: len(grads)]
    assert_near(output, expected)
    for found, wanted in zip(grads, expected_grads, strict=True):
        torch.testing.assert_close(found.float(), wanted, rtol=5e-2, atol=5e-3)


def test_embeddings_keep_their_tables_dtype() -> None:
    indices = torch.tensor([[0, 1], [2, 3]], device=DEVICE)
    bag = converted(nn.EmbeddingBag(5, 4, mode="sum"))
    assert bag(indices).dtype == FLOAT
    weights = rand(2, 2).requires_grad_()
    torch.testing.assert_close(
        bag(indices, per_sample_weights=weights), (bag.weight[indices] * weights[..., None]).sum(1)
    )
    assert converted(nn.Embedding(5, 4))(indices).dtype == FLOAT


@needs("channels_last")
def test_channels_last_stays() -> None:
    layers = [nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.GELU(), nn.Conv2d(4, 4, 3)]
    model = converted(nn.Sequential(*layers)).to(memory_format=torch.channels_last)
    output = model(rand(2, 3, 8, 8).contiguous(memory_format=torch.channels_last))
    assert output.dtype == HALF
    assert output.is_contiguous(memory_format=torch.channels_last)


LOSSES: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "huber_loss": lambda x, y, c: F.huber_loss(x, y),
    "gaussian_nll_loss": lambda x, y, c: F.gaussian_nll_loss(x, y, y),
    "triplet_margin_with_distance_loss": lambda x, y, c: F.triplet_margin_with_distance_loss(x, y, y.flip(0)),
    "cross_entropy, weights": lambda x, y, c: F.cross_entropy(x, c, weight=y[0]),
    "cross_entropy, 2-d": lambda x, y, c: F.cross_entropy(x.T[None, :, :], c[None]),
    "multi_margin_loss, weights": lambda x, y, c: F.multi_margin_loss(x, c, weight=y[0]),
    "binary_cross_entropy_with_logits, weights": lambda x, y, c: F.binary_cross_entropy_with_logits(
        x, y / 2, pos_weight=y[0]
    ),
}


@pytest.mark.parametrize("name", LOSSES)
def test_losses_run_in_float(name: str) -> None:
    o1()
    x, y, classes = rand(4, 4), rand(4, 4), torch.tensor([0, 1, 2, 3], device=DEVICE)
    with amp.disable_casts():
        expected = LOSSES[name](x, y, classes)
    half = x.half().requires_grad_()
    result = LOSSES[name](half, y, classes)
    result.backward()
    assert half.grad is not None
    assert (result.dtype, half.grad.dtype) == (FLOAT, HALF)
    torch.testing.assert_close(result, expected, rtol=2e-3, atol=1e-3)  # cdist and the like give half


def test_adaptive_log_softmax() -> None:
    model = converted(nn.AdaptiveLogSoftmaxWithLoss(4, 4, [2]))
    x, classes = rand(4, 4), torch.tensor([0, 1, 2, 3], device=DEVICE)
    with amp.disable_casts():
        expected = model(x, classes).loss
    for dtype in (FLOAT, HALF):
        assert_near(model(x.to(dtype), classes).loss, expected)


ASSIGNMENTS: dict[str, Callable[[Tensor, Tensor, Tensor], Any]] = {
    "x[indices] = y": lambda x, i, y: x.__setitem__(i, y),
    "x[mask] = y": lambda x, i, y: x.__setitem__(torch.ones(3, dtype=torch.bool, device=DEVICE), y),
    "index_put_": lambda x, i, y: x.index_put_((i,), y, accumulate=True),
    "index_copy_": lambda x, i, y: x.index_copy_(0, i, y),
    "index_add_": lambda x, i, y: x.index_add_(0, i, y),
    "masked_scatter_": lambda x, i, y: x.masked_scatter_(torch.ones_like(x, dtype=torch.bool), y),
    "scatter_": lambda x, i, y: x.scatter_(0, i[:, None].expand(3, 4), y),
    "scatter_add_": lambda x, i, y: x.scatter_add_(0, i[:, None].expand(3, 4), y),
    "scatter_reduce_": lambda x, i, y: x.scatter_reduce_(0, i[:, None].expand(3, 4), y, "amax"),
}


@pytest.mark.parametrize(("own", "other"), [(FLOAT, HALF), (HALF, FLOAT)], ids=str)
@pytest.mark.parametrize("name", ASSIGNMENTS)
def test_assigning_to_elements_takes_the_type_of_the_target(name: str, own: torch.dtype, other: torch.dtype) -> None:
    o1()
    indices, y = torch.tensor([2, 0, 1], device=DEVICE), rand(3, 4).requires_grad_()
    target, expected = torch.ones(3, 4, dtype=own, device=DEVICE), torch.ones(3, 4, dtype=own, device=DEVICE)
    ASSIGNMENTS[name](target, indices, y.to(other))
    with amp.disable_casts():
        ASSIGNMENTS[name](expected, indices, y.to(own))
    assert target.dtype == own
    assert torch.equal(target, expected)
    target.sum().backward()
    assert y.grad is not None


# -------------------------------------------------------------------------------------------------- other kinds of data


@needs("complex_norm")
def test_complex_numbers_are_left_alone() -> None:
    o1()
    c = torch.complex(torch.eye(3), torch.ones(3, 3)).to(DEVICE)
    for result in (c @ c, c.exp(), c.sum(), c**2, torch.dot(c[0], c[1]), torch.addr(c, c[0], c[0]), F.linear(c, c)):
        assert result.dtype == torch.complex64
    assert torch.linalg.norm(c).dtype == FLOAT


def test_fourier_transforms_run_in_float() -> None:
    o1()
    x = rand(8)
    assert torch.fft.rfft(x).dtype == torch.complex64
    torch.testing.assert_close(torch.fft.irfft(torch.fft.rfft(x)), x)


@pytest.mark.skipif(not ON_CPU, reason="the simulated device has no sparse matrix products")
def test_sparse_gradients_and_products() -> None:
    o1()
    x = rand(3, 3)
    sparse = torch.eye(3).to_sparse()
    for result in (sparse @ x, torch.sparse.mm(sparse, x)):
        assert result.dtype == HALF
        assert_near(result, x)
    table = converted(nn.Embedding(5, 4, sparse=True))
    (table(torch.tensor([1, 2])) @ rand(4, 2)).float().sum().backward()
    assert table.weight.grad.is_sparse
    assert table.weight.grad.dtype == FLOAT


@pytest.mark.skipif(not ON_CPU, reason="the simulated device has no quantised tensors")
def test_quantised_tensors_are_left_alone() -> None:
    o1()
    quantised = torch.quantize_per_tensor(rand(3, 3), 0.25, 0, torch.quint8)
    assert quantised.dequantize().dtype == FLOAT


# -------------------------------------------------------------------------------------- transforms, compile, checkpoint


def small() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 2))


def test_func_grad_equals_backward() -> None:
    model, x = converted(small()), rand(3, 4)
    params = dict(model.named_parameters())

    def loss(params: dict[str, Tensor], x: Tensor) -> Tensor:
        output: Tensor = torch.func.functional_call(model, params, (x,))
        return output.float().square().mean()

    got = torch.func.grad(loss)(params, x)
    for a, b in zip(got.values(), gradients(model, lambda: model(x)), strict=True):
        assert a.dtype == FLOAT
        assert_near(a, b)
    per_sample = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(
        {k: v.detach() for k, v in params.items()}, x
    )
    for name, value in per_sample.items():
        assert_near(value, torch.stack([torch.func.grad(loss)(params, row)[name] for row in x]))


@needs("functorch_linear")
def test_func_jacobians() -> None:
    o1()
    weight, x = rand(4, 4), rand(4)

    def function(x: Tensor) -> Tensor:
        return torch.softmax(torch.tanh(weight @ x), 0)

    with amp.disable_casts():
        expected = torch.func.jacrev(function)(x)
    assert_near(torch.func.jacrev(function)(x), expected)
    assert_near(torch.func.jacfwd(function)(x), expected)
    assert_near(torch.func.jvp(function, (x,), (torch.ones_like(x),))[1], expected.sum(1))


def test_func_grad_of_a_float_region_runs_in_float() -> None:
    o1()
    x = torch.full((2, 2), 3000.0, device=DEVICE)

    def loss(weight: Tensor) -> Tensor:
        with amp.disable_casts():
            return (x @ weight).sum() * 1000.0

    # 6e6 is beyond half's range.
    assert torch.equal(torch.func.grad(loss)(torch.ones_like(x)), torch.full_like(x, 6.0e6))


@pytest.mark.sweep
@pytest.mark.skipif(not ON_CPU, reason="no inductor for this device")
@pytest.mark.skipif(" " in torch.__file__, reason="inductor gives its own folder to the linker without quotes")
def test_inductor_equals_eager() -> None:
    torch._dynamo.reset()
    model, x = converted(small()), rand(3, 4)
    compiled = torch.compile(model)
    expected = gradients(model, lambda: model(x))
    for a, b in zip(gradients(model, lambda: compiled(x)), expected, strict=True):
        assert_near(a, b)
    assert compiled(x).dtype == HALF


def test_checkpoints_of_both_kinds_inside_a_forward() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.norm = nn.Linear(8, 8), nn.LayerNorm(8)
            self.reentrant: bool | None = None

        def block(self, x: Tensor) -> Tensor:
            # Twice: the recomputation casts the weight again, the forward did so once.
            return self.layer(F.gelu(self.norm(self.layer(x))))

        def forward(self, x: Tensor) -> Tensor:
            if self.reentrant is None:
                return self.block(x)
            result: Tensor = checkpoint(self.block, x, use_reentrant=self.reentrant)
            return result

    model = converted(Model())
    x = rand(2, 8).requires_grad_()
    expected = gradients(model, lambda: model(x))
    for model.reentrant in (True, False):
        for a, b in zip(gradients(model, lambda: model(x)), expected, strict=True):
            # Autograd sums the two uses of the weight in half where they share a cast.
            torch.testing.assert_close(a, b, rtol=2e-3, atol=1e-4)


# ----------------------------------------------------------------------------------------------- modes, blocks, workers


def test_a_weight_used_without_grad_first_still_gets_one() -> None:
    # Older releases of torch keep the copy that autocast makes under no_grad (pytorch#158232).
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.matrix = nn.Linear(4, 4), nn.Parameter(torch.eye(4))

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                self.layer(x), torch.addr(self.matrix, x[0], x[0])
            return self.layer(x) + torch.addr(self.matrix, x[0], x[0]).sum()

    model = converted(Model())
    x = rand(2, 4)
    got = gradients(model, lambda: model(x))
    with amp.disable_casts():
        expected = gradients(model, lambda: model(x))
    assert len(got) == 3
    torch.testing.assert_close(got, expected, rtol=5e-2, atol=5e-3)


def test_a_generator_that_is_closed_inside_disable_casts() -> None:
    o1()
    x = rand(2, 2)

    def generate() -> Any:
        with amp.disable_casts():
            yield (x @ x).dtype

    generator = generate()
    assert next(generator) == FLOAT
    generator.close()
    assert (x @ x).dtype == HALF


class Products(Dataset[Tensor]):
    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> Tensor:
        return torch.ones(2, 2) @ torch.ones(2, 2)


@pytest.mark.slow
@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_the_workers_of_a_data_loader_do_not_cast(context: str) -> None:
    o1()
    loader = DataLoader(Products(), num_workers=1, multiprocessing_context=context)
    assert {batch.dtype for batch in loader} == {FLOAT}


@pytest.mark.skipif(DEVICE.type != "cpu", reason="of CPUs")
@pytest.mark.parametrize("level", ["O2", "O5"])
@pytest.mark.parametrize("owner", [torch, torch.linalg, Tensor], ids=["torch", "linalg", "Tensor"])
def test_matrix_exp_of_a_cast_model_computes_in_float(owner: Any, level: str) -> None:
    call = owner.matrix_exp
    dtype = torch.float16 if level == "O2" else torch.bfloat16
    amp.initialize(nn.Linear(1, 1), opt_level=level, verbosity=0)
    given = (SQUARE / 4).to(dtype).requires_grad_()
    found = owner.matrix_exp(given)
    wide = given.detach().double().requires_grad_()
    expected = call(wide)
    for result in (found, expected):
        result.sum().backward()
    assert found.dtype == dtype
    tolerance = 4 * torch.finfo(dtype).eps
    torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=0.0)
    torch.testing.assert_close(given.grad.double(), wide.grad, rtol=tolerance, atol=0.0)
    amp.shutdown()
    assert owner.matrix_exp is call
