# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""ONNX files of models trained at any level: onnxruntime gives the results of a plain float32 model."""

import contextlib
import copy
import importlib
import importlib.metadata
import sys
import types
from pathlib import Path

import pytest
import torch
from devices import DEVICE, needs, require
from torch import nn

from apex_npu import amp, export, optimizers

sys.path.append(str(Path(__file__).parents[2] / "examples"))

LEVELS = ["O0", "O1", "O2", "O3", "O4", "O5"]


def needs_onnx():
    if DEVICE.type != "cpu":
        pytest.skip("a file is the same whatever the device that its model was on")
    require("onnx_export")
    packages = ("onnx", "onnxscript", "onnxruntime")
    return [pytest.importorskip(name, reason=f"{name} is not installed") for name in packages]


def make() -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(16, 3)]
    return nn.Sequential(*layers)


def images(count=2) -> torch.Tensor:
    return torch.randn(count, 1, 4, 4, generator=torch.Generator().manual_seed(1))


def train(model, level, *inputs, steps=2):
    """``model`` after some steps at ``level``, which move the statistics of batch norms, too."""
    optimizer = optimizers.NpuFusedSGD(model.parameters(), lr=1e-2)
    options = {"loss_scale": 64.0} if level in ("O2", "O3") else {}
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0, **options)
    for _ in range(steps):
        optimizer.zero_grad()
        with amp.scale_loss(model(*inputs).float().square().mean(), optimizer) as scaled:
            scaled.backward()
        optimizer.step()
        assert amp.last_step(optimizer).applied
    return model


def plain_results(make_model, model, *inputs):
    """Of plain torch with the state dict of ``model``, without the exporter and amp's copies."""
    amp_off = make_model()
    amp_off.load_state_dict({name: v.float() if v.is_floating_point() else v for name, v in model.state_dict().items()})
    with torch.no_grad(), amp.disable_casts():
        return amp_off.eval()(*inputs)


def run(path, *inputs):
    """The file in onnxruntime."""
    session = needs_onnx()[2].InferenceSession(path, providers=["CPUExecutionProvider"])
    names = [value.name for value in session.get_inputs()]
    found = session.run(None, {name: value.numpy() for name, value in zip(names, inputs, strict=True)})
    return torch.from_numpy(found[0])


def operators(path):
    """The names of the file's operators, the version of their set, and the types of the weights."""
    onnx = needs_onnx()[0]
    file = onnx.load(path)
    onnx.checker.check_model(file)
    types = {onnx.TensorProto.DataType.Name(tensor.data_type) for tensor in file.graph.initializer}
    (version,) = [entry.version for entry in file.opset_import if entry.domain == ""]
    return [node.op_type for node in file.graph.node], version, types


def assert_near(actual, expected, tolerance):
    assert actual.shape == expected.shape
    assert (actual.float() - expected).abs().max() <= tolerance * expected.abs().max()


def digit_net():
    from digits import DigitNet

    torch.manual_seed(0)
    return DigitNet(8)


def exported(tmp_path, make_model, level, *inputs, dtype=torch.float32, **options):
    """Trained, written and compared by the test itself; what ``operators`` says of the file."""
    model = train(make_model(), level, *inputs)
    path = tmp_path / "net.onnx"
    found = export.to_onnx(model, inputs, path, dtype=dtype, allow_rounded=level == "O3", **options)
    tolerance = {torch.float32: 1e-4, torch.float16: 2e-2}[dtype]
    assert found <= tolerance
    with torch.no_grad():
        expected = plain_results(make_model, model, *inputs)
    cast = [value.to(dtype) if value.is_floating_point() else value for value in inputs]
    actual = run(path, *cast)
    assert actual.dtype == dtype
    assert_near(actual, expected, tolerance)
    assert [entry.name for entry in tmp_path.iterdir()] == ["net.onnx"]
    return operators(path)


def test_masters_of_o2(tmp_path):
    needs_onnx()
    names, version, types = exported(tmp_path, make, "O2", images(), opset=18)
    assert set(names) <= {"Conv", "Relu", "Reshape", "Flatten", "Gemm"}
    assert version == 18
    assert types <= {"FLOAT", "INT64"}


@pytest.mark.sweep
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("level", LEVELS)
def test_the_digits_model_at_every_level(tmp_path, level, dtype):
    needs_onnx()
    inputs = torch.randn(4, 1, 8, 8, generator=torch.Generator().manual_seed(2))
    names, _, types = exported(tmp_path, digit_net, level, inputs, dtype=dtype)
    assert "Cast" not in names
    assert "BatchNormalization" not in names
    assert types <= {"FLOAT" if dtype == torch.float32 else "FLOAT16", "INT64"}


@pytest.mark.sweep
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_the_newest_operators(tmp_path, level):
    onnx, _, runtime = needs_onnx()
    # Of those that this onnxruntime takes without a warning.
    newest = min(onnx.defs.onnx_opset_version(), 25 if runtime.__version__ >= "1.30" else 23)
    names, version, _ = exported(tmp_path, make, level, images(), opset=newest)
    assert version == newest
    assert "Cast" not in names


class Encoder(nn.Module):
    """Two layers of BERT's kind over tokens, with a mask."""

    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(20, 16)
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, activation="gelu", batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(16, 5)

    def forward(self, tokens):
        return self.head(self.layers(self.tokens(tokens))[:, 0])


def encoder():
    torch.manual_seed(0)
    return Encoder()


@pytest.mark.slow
@pytest.mark.parametrize(("level", "dtype"), [("O1", torch.float32), ("O2", torch.float32), ("O5", torch.float16)])
def test_an_encoder(tmp_path, level, dtype):
    needs_onnx()
    tokens = torch.randint(0, 20, (3, 7), generator=torch.Generator().manual_seed(3))
    names, _, _ = exported(tmp_path, encoder, level, tokens, dtype=dtype)
    assert "Cast" not in names


@pytest.mark.framework
@pytest.mark.sweep
@pytest.mark.parametrize("level", LEVELS)
def test_bert(tmp_path, level):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    needs_onnx()

    def bert():
        torch.manual_seed(0)
        config = transformers.BertConfig(
            hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64, vocab_size=50
        )
        return transformers.BertForSequenceClassification(config)

    class Logits(nn.Module):
        def __init__(self):
            super().__init__()
            self.bert = bert()

        def forward(self, tokens):
            return self.bert(input_ids=tokens).logits

    tokens = torch.randint(0, 50, (2, 9), generator=torch.Generator().manual_seed(3))
    names, _, types = exported(tmp_path, Logits, level, tokens)
    assert types <= {"FLOAT", "INT64", "BOOL"}
    assert "Cast" not in names


@pytest.mark.sweep
@pytest.mark.parametrize("level", LEVELS)
def test_a_resnet(tmp_path, monkeypatch, level):
    needs_onnx()
    dtype = torch.float16 if level == "O2" else torch.float32
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "examples" / "imagenet"))
    monkeypatch.delitem(sys.modules, "models", raising=False)
    models = importlib.import_module("models")
    monkeypatch.delitem(sys.modules, "models")  # a name that the folders of examples have in common

    def resnet():
        torch.manual_seed(0)
        return models.ResNet(*models.RESNETS["resnet18"], 10)

    inputs = torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(2))
    names, _, _ = exported(tmp_path, resnet, level, inputs, dtype=dtype, fold_batch_norm=True)
    assert "Cast" not in names
    assert names.count("Conv") == 20
    assert "BatchNormalization" not in names


@pytest.mark.slow
def test_running_variances_that_float16_does_not_have(tmp_path):
    needs_onnx()
    model = make()
    model[1].running_var.fill_(1e6)
    model[0].weight.data.mul_(1e3)
    with pytest.raises(
        export.ExportError, match=r"1 weights .* infinite in float16 \(1\.running_var\).*fold_batch_norm"
    ):
        export.to_onnx(model, (images(),), tmp_path / "net.onnx", dtype=torch.float16)
    assert not list(tmp_path.iterdir())
    export.to_onnx(model, (images(),), tmp_path / "net.onnx", dtype=torch.float16, fold_batch_norm=True)
    assert_near(run(tmp_path / "net.onnx", images().half()), model.eval()(images()).detach(), 2e-2)


@pytest.mark.slow
def test_sizes_that_vary_and_names(tmp_path):
    onnx, _, _ = needs_onnx()
    model = train(make(), "O2", images())
    path = tmp_path / "net.onnx"
    export.to_onnx(
        model,
        (images(),),
        path,
        input_names=["pixels"],
        output_names=["scores"],
        dynamic_shapes=({0: torch.export.Dim("batch", min=1, max=64)},),
    )
    assert_near(run(path, images(5)), plain_results(make, model, images(5)), 1e-4)
    graph = onnx.load(path).graph
    assert [value.name for value in (*graph.input, *graph.output)] == ["pixels", "scores"]


class Gated(nn.Module):
    """An input by its place, one by its name; two outputs in a dict."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x, *, gate):
        y = self.layer(x)
        return {"gated": y * gate, "best": y.argmax(dim=1)}


@pytest.mark.slow
def test_inputs_by_name_and_several_outputs(tmp_path):
    needs_onnx()
    torch.manual_seed(0)
    model, x, gate = Gated(), torch.randn(3, 4), torch.randn(4)
    path = tmp_path / "net.onnx"
    assert export.to_onnx(model, (x,), path, kwargs={"gate": gate}) < 1e-4
    with torch.no_grad():
        assert_near(run(path, x, gate), model(x, gate=gate)["gated"], 1e-4)


@pytest.mark.slow
def test_a_wrong_result_is_not_written(tmp_path, monkeypatch):
    needs_onnx()
    path = tmp_path / "net.onnx"
    path.write_text("old")

    exporter = torch.onnx.export

    def wrong(model, args, **options):
        model = copy.deepcopy(model)
        model[4].bias.add_(1.0)
        return exporter(model, args, **options)

    monkeypatch.setattr(torch.onnx, "export", wrong)
    with pytest.raises(export.ExportError, match=r"differ from the model's by .* more than 0\.0001: it is not written"):
        export.to_onnx(make(), (images(),), path)
    assert path.read_text() == "old"
    assert export.to_onnx(make(), (images(),), path, check=False) is None
    assert [entry.name for entry in tmp_path.iterdir()] == ["net.onnx"]
    assert operators(path)


# --- refused, before anything is exported ----------------------------------------------------------------------------


@pytest.fixture
def installed(monkeypatch):
    """As if all packages were there: what is refused is refused before they are imported."""
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "99.0")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize(
    "level", ["O0", "O1", "O2", "O3", pytest.param("O4", marks=needs("autocast_to_bfloat16")), "O5"]
)
def test_what_the_exporter_gets(tmp_path, installed, monkeypatch, level, dtype):
    """The weights of the state dict in ``dtype`` on the CPU, inputs likewise, and no cast of amp while it runs."""
    model = train(make().to(DEVICE), level, images().to(DEVICE))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    got = []

    def exporter(exported, args, **options):
        got.append((exported, args))
        with torch.no_grad():
            assert torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype == torch.float32
        return Program()

    monkeypatch.setattr(torch.onnx, "export", exporter)
    path = tmp_path / "net.onnx"
    export.to_onnx(model, (images().to(DEVICE),), path, dtype=dtype, check=False, allow_rounded=level == "O3")
    ((exported, (inputs,)),) = got
    assert not exported.training
    assert (inputs.device.type, inputs.dtype) == ("cpu", dtype)
    state = exported.state_dict()
    for name, value in before.items():
        expected = value.cpu().float().to(dtype) if value.is_floating_point() else value.cpu()
        assert torch.equal(state[name], expected), name
        assert torch.equal(model.state_dict()[name], value), name


def test_weights_in_low_precision_alone(tmp_path, installed):
    model = train(make(), "O3", images())
    with pytest.raises(RuntimeError, match=r"exist in float16 alone.*allow_rounded=True"):
        export.to_onnx(model, (images(),), tmp_path / "net.onnx")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"model": {}}, TypeError, "to_onnx takes a model, torch.nn.Module, got dict"),
        ({"model": nn.DataParallel(nn.Linear(1, 1))}, TypeError, "got DataParallel around one: pass model.module"),
        ({"args": torch.ones(1)}, TypeError, r"args must be a tuple of inputs, got Tensor: .*pass \(input,\)"),
        ({"dtype": torch.bfloat16}, ValueError, "dtype=torch.bfloat16: torch.float32 or torch.float16 is expected"),
        ({"path": "."}, export.ExportError, r"\. is a folder"),
        ({"path": "missing/net.onnx"}, export.ExportError, "missing/net.onnx: No such file"),
        ({"path": "file/net.onnx"}, export.ExportError, "file/net.onnx: Not a directory"),
    ],
)
def test_what_is_refused(tmp_path, monkeypatch, installed, change, error, message):
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("old")
    call = {"model": make(), "args": (images(),), "path": "net.onnx"} | change
    with pytest.raises(error, match=message):
        export.to_onnx(**call)
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]


class Branching(nn.Module):
    def forward(self, x):
        return x if x.sum() > 0 else -x


def test_a_model_that_fx_cannot_trace(tmp_path, installed):
    with pytest.raises(export.ExportError, match=r"fold_batch_norm=True: torch.fx cannot trace Branching \(TraceError"):
        export.to_onnx(Branching(), (images(),), tmp_path / "net.onnx", fold_batch_norm=True)
    assert not list(tmp_path.iterdir())


def test_the_reason_is_that_of_the_first_error(tmp_path, installed, monkeypatch):
    def fail(*args, **options):
        try:
            try:
                raise ValueError("\x1b[96mCould not guard\x1b[0m on an expression\nmore")
            except ValueError as error:
                raise KeyError("x") from error
        except KeyError as error:
            raise RuntimeError("Failed to export. \x1b[96mThis is step 1/3\x1b[0m") from error

    monkeypatch.setattr(torch.onnx, "export", fail)
    with pytest.raises(export.ExportError, match=r"this Sequential \(ValueError: Could not guard on an expression\)$"):
        export.to_onnx(make(), (images(),), tmp_path / "net.onnx")
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_branch_on_values_is_named(tmp_path):
    needs_onnx()
    with pytest.raises(export.ExportError, match=r"Branching \(GuardOnDataDependentSymNode: ") as caught:
        export.to_onnx(Branching(), (images(),), tmp_path / "net.onnx")
    assert "\x1b" not in str(caught.value)


def contents(folder):
    return {entry.name: entry.read_text() for entry in folder.iterdir() if entry.is_file()}


class Program:
    """What torch's exporter returns: it writes the text "new" to ``path`` and the files with ``suffixes``, or fails."""

    model = types.SimpleNamespace(opset_imports={"": 18})

    def __init__(self, *suffixes, fails=False):
        self.suffixes, self.fails = suffixes, fails

    def save(self, path):
        for suffix in ("", *self.suffixes):
            path.with_name(path.name + suffix).write_text("new")
        if self.fails:
            raise OSError("disk full")

    def __call__(self, *args):
        raise RuntimeError("opset 99 is under development")


@pytest.fixture
def exports(installed, monkeypatch):
    """Put a Program in place of torch's exporter."""
    return lambda program: monkeypatch.setattr(torch.onnx, "export", lambda *args, **options: program)


@pytest.mark.parametrize("exists", [True, False])
def test_a_link_stays(tmp_path, exports, exists):
    exports(Program(".data"))
    (tmp_path / "store").mkdir()
    if exists:
        (tmp_path / "store" / "v2.onnx").write_text("old")
    link = tmp_path / "net.onnx"
    link.symlink_to("store/v2.onnx")
    export.to_onnx(make(), (images(),), link, check=False)
    assert link.is_symlink()
    assert contents(tmp_path / "store") == {"v2.onnx": "new", "v2.onnx.data": "new"}
    assert {entry.name for entry in tmp_path.iterdir()} == {"net.onnx", "store"}


@pytest.mark.parametrize("exists", [True, False])
def test_weights_of_an_earlier_export_are_removed(tmp_path, exports, exists):
    exports(Program())
    (tmp_path / "net.onnx.data").write_text("weights")
    if exists:
        (tmp_path / "net.onnx").write_text("refers to net.onnx.data")
    export.to_onnx(make(), (images(),), tmp_path / "net.onnx", check=False)
    # A file of that name without a model beside it is not one of an export.
    assert contents(tmp_path).keys() == {"net.onnx"} | (set() if exists else {"net.onnx.data"})


def test_an_opset_that_the_exporter_does_not_reach(tmp_path, exports):
    exports(Program())
    with pytest.raises(export.ExportError, match=r"opset=99: torch\.onnx exports this model with opset 18"):
        export.to_onnx(make(), (images(),), tmp_path / "net.onnx", opset=99)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("fails", [False, True])
def test_weights_in_a_second_file(tmp_path, exports, fails):
    exports(Program(".data", fails=fails))
    (tmp_path / "net.onnx").write_text("old")
    with pytest.raises(OSError, match="disk full") if fails else contextlib.nullcontext():
        export.to_onnx(make(), (images(),), tmp_path / "net.onnx", check=False)
    assert contents(tmp_path) == ({"net.onnx": "old"} if fails else {"net.onnx": "new", "net.onnx.data": "new"})


def test_a_file_that_onnxruntime_does_not_run(tmp_path, exports):
    exports(Program())
    with pytest.raises(export.ExportError, match=r"cannot run the file \(RuntimeError: opset 99 is "):
        export.to_onnx(make(), (images(),), tmp_path / "net.onnx")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["onnx", "onnxscript", "onnxruntime"])
def test_an_old_package(tmp_path, monkeypatch, name):
    monkeypatch.setattr(importlib.metadata, "version", lambda asked: "0.1.0" if asked == name else "99.0")
    with pytest.raises(ImportError, match=rf'needs {name} >= [\d.]+ \(0\.1\.0 is installed\): pip install "{name}>='):
        export.to_onnx(make(), (images(),), tmp_path / "net.onnx")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("actual", "expected", "difference"),
    [
        ([1.0, -2.0], [1.0, -2.0], 0.0),
        ([1.0, -2.5], [1.0, -2.0], 0.25),
        ([float("inf"), float("nan"), 1.5], [float("inf"), float("nan"), 1.0], 0.5),
        ([1.0, float("nan")], [1.0, 2.0], float("inf")),
        ([1.0, 2.0], [1.0, float("inf")], float("inf")),
        ([0.1, 0.0], [0.0, 0.0], float("inf")),
        ([1, 2], [1, 3], 0.0),
    ],
)
def test_differences(actual, expected, difference):
    from apex_npu.export.onnx import _relative

    assert _relative(torch.tensor(actual), torch.tensor(expected)) == difference
