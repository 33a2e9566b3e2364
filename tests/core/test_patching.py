"""Models of torch whose modules compute by ours: beside the same models unpatched, and back."""

from __future__ import annotations

import copy
import functools
import math
import re
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import triplan.functional
from triplan import nn
from triplan.nn import _known
from triplan.nn.patching import _equals

Tensor = torch.Tensor
F64 = torch.float64


def values(*shape: int) -> Tensor:
    """The same on every call."""
    return torch.randn(shape, dtype=F64, generator=torch.Generator().manual_seed(len(shape)))


INDICES = torch.tensor([[0, 3, 3], [5, 1, 0]])
#: The arguments of the module and of its forward; those that are not here are functions of one tensor.
GIVEN: dict[str, tuple[tuple[Any, ...], tuple[Tensor, ...]]] = {
    **{f"{kind}Pool1d": ((2,), (values(2, 3, 8),)) for kind in ("Max", "Avg", "AdaptiveAvg")},
    **{f"{kind}Pool2d": ((2,), (values(2, 3, 8, 6),)) for kind in ("Max", "Avg", "AdaptiveAvg")},
    "Upsample": ((None, 1.5, "bilinear"), (values(2, 3, 4, 5),)),
    "UpsamplingNearest2d": (((7, 3),), (values(2, 3, 4, 5),)),
    "UpsamplingBilinear2d": (((7, 3),), (values(2, 3, 4, 5),)),
    **{f"BatchNorm{axes}d": ((4,), (values(3, 4, 5, 2, 3)[(..., *(0,) * (3 - axes))],)) for axes in (1, 2, 3)},
    **{f"ConstantPad{axes}d": (((1, 2) * axes, 1.5), (values(2, 3, 4, 5, 6),)) for axes in (1, 2, 3)},
    **{f"ZeroPad{axes}d": (((1, 2) * axes,), (values(2, 3, 4, 5, 6),)) for axes in (1, 2, 3)},
    **{f"Dropout{axes}d": ((1.0,), (values(2, 3, *(4,) * axes),)) for axes in (1, 2, 3)},  # certain: drops all
    "Dropout": ((1.0,), (values(3, 4, 6),)),
    "Conv1d": ((4, 6, 3, 2, 1), (values(2, 4, 9),)),
    "Conv2d": ((4, 6, (3, 2), 1, "same", 1, 2), (values(2, 4, 7, 5),)),
    "CrossEntropyLoss": ((torch.arange(1.0, 7),), (values(2, 6), torch.tensor([4, 1]))),
    "NLLLoss": ((), (values(2, 6), torch.tensor([4, 1]))),
    **dict.fromkeys(("MSELoss", "L1Loss", "SmoothL1Loss", "HuberLoss"), ((), (values(2, 6), values(2, 6) ** 2))),
    "Embedding": ((6, 4, 0), (INDICES,)),
    "EmbeddingBag": ((6, 4), (INDICES,)),
    "GroupNorm": ((2, 4), (values(3, 4, 5),)),
    "LayerNorm": ((6,), (values(3, 4, 6),)),
    "RMSNorm": ((6,), (values(3, 4, 6),)),
    "Linear": ((6, 5), (values(3, 4, 6),)),
    "LogSoftmax": ((1,), (values(3, 4, 6),)),
    "MultiheadAttention": ((8, 2), (values(5, 3, 8),) * 3),
    "PReLU": ((4,), (values(3, 4, 6),)),
    "Softmax": ((1,), (values(3, 4, 6),)),
    "Threshold": ((0.1, 2.0), (values(3, 4, 6),)),
}


def first(out: Any) -> Tensor:
    tensor: Tensor = out[0] if isinstance(out, tuple) else out
    return tensor


def trained(model: torch.nn.Module, *inputs: Any) -> tuple[Tensor, list[Tensor | None]]:
    """The result, and the gradients of a sum of it, of inputs and parameters."""
    given = [t.clone().requires_grad_() if isinstance(t, Tensor) and t.is_floating_point() else t for t in inputs]
    out = first(model(*given))
    wanted = [t for t in (*given, *model.parameters()) if isinstance(t, Tensor) and t.requires_grad]
    weights = torch.linspace(-1, 2, out.numel(), dtype=out.dtype, device=out.device).view(out.shape)
    return out.detach(), list(torch.autograd.grad((out * weights).sum(), wanted, allow_unused=True))


@pytest.mark.parametrize("name", sorted(kind.__name__ for kind in _equals()))
def test_each_type_computes_what_torchs_does(name: str) -> None:
    arguments, inputs = GIVEN.get(name, ((), (values(3, 4, 6),)))
    theirs = getattr(torch.nn, name)(*arguments).double()
    for p in theirs.parameters():
        torch.nn.init.normal_(p)
    ours = copy.deepcopy(theirs)
    before = dict(vars(ours))
    assert nn.patch(ours).replaced == {"": (name, name)}
    assert isinstance(ours, (type(theirs), getattr(nn, name)))
    assert repr(ours).startswith(name)
    torch.testing.assert_close(trained(ours, *inputs), trained(theirs, *inputs))
    torch.testing.assert_close(ours.state_dict(), theirs.state_dict())  # running statistics, too
    theirs.load_state_dict(ours.state_dict())
    assert nn.unpatch(ours) >= 1
    assert type(ours) is type(theirs)
    assert vars(ours).keys() == before.keys()
    assert all(vars(ours)[key] is value for key, value in before.items())


class LlamaRMSNorm(torch.nn.Module):
    """As the transformers library defines those of Llama, Mistral and Qwen (in the input's precision)."""

    def __init__(self, width: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(width))
        self.variance_epsilon = eps

    def forward(self, hidden_states: Tensor) -> Tensor:
        normed = hidden_states * torch.rsqrt(hidden_states.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * normed


class GemmaRMSNorm(torch.nn.Module):
    def __init__(self, width: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.eps, self.weight = eps, torch.nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * (1.0 + self.weight)


class CentredNorm(LlamaRMSNorm):
    def forward(self, hidden_states: Tensor) -> Tensor:
        return super().forward(hidden_states - hidden_states.mean(-1, keepdim=True))


class OuterEpsNorm(LlamaRMSNorm):
    def forward(self, hidden_states: Tensor) -> Tensor:
        root = hidden_states.pow(2).mean(-1, keepdim=True).sqrt()
        return self.weight * hidden_states / (root + self.variance_epsilon)


class GatedNorm(LlamaRMSNorm):
    def forward(self, hidden_states: Tensor, gate: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(hidden_states) * gate


@pytest.mark.parametrize("width", [1, 6])
@pytest.mark.parametrize(("kind", "what"), [(LlamaRMSNorm, "RMSNorm"), (GemmaRMSNorm, "RMSNorm(weight_offset=1)")])
def test_rms_norms_are_known_by_their_results(kind: Callable[[int], Any], what: str, width: int, device: str) -> None:
    theirs = kind(width).to(device, F64)
    torch.nn.init.normal_(theirs.weight)
    ours, x, state = copy.deepcopy(theirs), values(3, 4, width).to(device), torch.get_rng_state()
    assert nn.patch(ours).replaced == {"": (type(theirs).__name__, what)}
    assert torch.equal(torch.get_rng_state(), state)
    assert isinstance(ours, type(theirs))
    assert type(ours) is not type(theirs)
    torch.testing.assert_close(trained(ours, x), trained(theirs, x))
    torch.testing.assert_close(copy.deepcopy(ours)(x), theirs(x))
    mixed = x.float()  # such classes differ in the dtype that they return
    assert torch.equal(ours(mixed), theirs(mixed))
    nn.unpatch(ours)
    assert type(ours) is type(theirs)
    assert vars(ours).keys() == vars(theirs).keys()


@pytest.mark.parametrize("kind", [CentredNorm, OuterEpsNorm, GatedNorm])
def test_other_norms_are_left(kind: Callable[[int], torch.nn.Module]) -> None:
    assert nn.patch(kind(6)).left == {"": (kind.__name__, "no equal in triplan.nn")}  # type: ignore[attr-defined]


def conv1d() -> torch.nn.Module:
    """As the transformers library defines that of GPT-2."""

    class Conv1D(torch.nn.Module):
        def __init__(self, nf: int, nx: int) -> None:
            super().__init__()
            self.nf, self.weight, self.bias = nf, torch.nn.Parameter(values(nx, nf)), torch.nn.Parameter(values(nf))

        def forward(self, x: Tensor) -> Tensor:
            return torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight).view(*x.shape[:-1], self.nf)

    return Conv1D(5, 6)


def activation(name: str, function: Callable[[Tensor], Tensor]) -> Callable[[], torch.nn.Module]:
    return type(name, (torch.nn.Module,), {"forward": lambda self, input: function(input)})


F = torch.nn.functional
ALIKE = {
    "Linear": conv1d,
    "GELU": activation("GELUActivation", F.gelu),
    "GELU(approximate='tanh')": activation(
        "NewGELU", lambda x: 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    ),
    "SiLU": activation("SiLUActivation", lambda x: x * torch.sigmoid(x)),
    "ReLU": activation("MyReLU", F.relu),
    "ReLUSquared": activation("ReLUSquaredActivation", lambda x: F.relu(x).square()),
}


@pytest.mark.parametrize("what", ALIKE)
def test_modules_of_libraries_are_known_by_their_results(what: str) -> None:
    theirs, x = ALIKE[what](), values(3, 4, 6)
    ours = copy.deepcopy(theirs)
    assert nn.patch(ours).replaced == {"": (type(theirs).__name__, what)}
    torch.testing.assert_close(trained(ours, x), trained(theirs, x))
    assert (nn.unpatch(ours), type(ours)) == (1, type(theirs))


@pytest.mark.parametrize(
    "function",
    [lambda x: F.gelu(x).clamp(-10, 10), lambda x: x * torch.sigmoid(1.702 * x), lambda x: (x, x), Tensor.double],
)
def test_other_activations_are_left(function: Callable[[Tensor], Any]) -> None:
    assert nn.patch(activation("GELUActivation", function)()).replaced == {}


class Gated(torch.nn.Module):
    """As the transformers library defines the MLP of Llama, Qwen and Gemma."""

    def __init__(self, act: torch.nn.Module) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = (
            torch.nn.Linear(*n, dtype=F64) for n in ((6, 9), (6, 9), (9, 6))
        )
        self.act_fn = act

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class Swapped(Gated):
    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.gate_proj(x) * self.act_fn(self.up_proj(x)))


@pytest.mark.parametrize("what", sorted(_known._GATED))
def test_gated_mlps_are_known_by_their_results(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs, x = Gated(ALIKE[what]()), values(3, 4, 6)
    ours = copy.deepcopy(theirs)
    assert nn.patch(ours).replaced[""] == ("Gated", f"gated {what}")
    calls = []
    monkeypatch.setitem(_known._GATED, what, lambda a, b, fused=_known._GATED[what]: calls.append(a) or fused(a, b))
    torch.testing.assert_close(trained(ours, x), trained(theirs, x))
    assert len(calls) == 1
    seen = []
    ours.act_fn.register_forward_hook(lambda *_: seen.append(1))
    torch.testing.assert_close(ours(x), theirs(x))
    assert (len(calls), seen) == (1, [1])  # a hook of the activation sees it called


def test_other_gates_are_left() -> None:
    report = nn.patch(Swapped(torch.nn.SiLU()))
    assert "" not in report.replaced
    assert len(report.replaced) == 4


class Block(torch.nn.Module):
    """As torchvision defines those of ResNet-18, and with ``layers`` = 3 those of ResNet-50."""

    def __init__(self, layers: int = 2, narrows: bool = False) -> None:
        super().__init__()
        self.layers, convs = layers, []
        for i in range(1, layers + 1):
            stride = 2 if narrows and i == 1 else 1
            convs.append(torch.nn.Conv2d(4, 4, 3, stride, 1, bias=False, dtype=F64))
            setattr(self, f"conv{i}", convs[-1])
            setattr(self, f"bn{i}", torch.nn.BatchNorm2d(4, dtype=F64))
        self.relu = torch.nn.ReLU(inplace=True)
        self.downsample = torch.nn.Conv2d(4, 4, 1, 2, dtype=F64) if narrows else None

    def forward(self, x: Tensor) -> Tensor:
        out = x
        for i in range(1, self.layers):
            out = self.relu(getattr(self, f"bn{i}")(getattr(self, f"conv{i}")(out)))
        out = getattr(self, f"bn{self.layers}")(getattr(self, f"conv{self.layers}")(out))
        out += x if self.downsample is None else self.downsample(x)
        return self.relu(out)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(("layers", "narrows"), [(2, False), (3, False), (3, True)])
def test_residual_blocks_are_known_by_their_results(
    layers: int, narrows: bool, training: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs, x = Block(layers, narrows).train(training), values(3, 4, 6, 6)
    ours = copy.deepcopy(theirs)
    assert nn.patch(ours).replaced[""] == ("Block", "batch_norm_relu")
    calls, fused = [], triplan.functional.batch_norm_relu
    monkeypatch.setattr(triplan.functional, "batch_norm_relu", lambda *given: calls.append(len(given)) or fused(*given))
    torch.testing.assert_close(trained(ours, x), trained(theirs, x))
    torch.testing.assert_close(dict(ours.named_buffers()), dict(theirs.named_buffers()))
    assert calls == [8] * (layers - 1) + [9]
    seen = []
    ours.bn1.register_forward_hook(lambda *_: seen.append(1))
    torch.testing.assert_close(ours(x), theirs(x))
    assert (len(calls), seen) == (layers, [1])  # a hook of a norm sees it called


def test_other_blocks_are_left() -> None:
    class Before(Block):
        """relu before the sum."""

        def forward(self, x: Tensor) -> Tensor:
            out = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
            return x + self.relu(out)

    assert "" not in nn.patch(Before()).replaced


def rotate_half(x: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat((-second, first), -1)


def apply_rotary_pos_emb(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> Any:
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin


def decorated(function: Any) -> Any:
    @functools.wraps(function)
    def call(*given: Any, **options: Any) -> Any:
        return function(*given, **options)

    return call


class Attention(torch.nn.Module):
    """As the transformers library rotates queries and keys."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj = (torch.nn.Linear(12, n, dtype=F64) for n in (12, 6))
        self.named = False

    @decorated
    def forward(self, x: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
        q, k = (part(x).view(*x.shape[:2], -1, 6).transpose(1, 2) for part in (self.q_proj, self.k_proj))
        q, k = apply_rotary_pos_emb(q, k, *tables, **({"unsqueeze_dim": 1} if self.named else {}))
        return q * k


def sdpa_attention_forward(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    given = {"attn_mask": attention_mask, "is_causal": attention_mask is None, "scale": options["scaling"]}
    return F.scaled_dot_product_attention(query, key, value, **given).transpose(1, 2), None


ALL_ATTENTION_FUNCTIONS = {"sdpa": sdpa_attention_forward}


class Interface(torch.nn.Module):
    """As the transformers library calls torch's function, or one that the user chose."""

    def __init__(self) -> None:
        super().__init__()
        self.proj, self.is_causal, self.options = torch.nn.Linear(6, 6, dtype=F64), True, {}

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        q = self.proj(x).view(2, 4, 3, 2).transpose(1, 2)
        function = ALL_ATTENTION_FUNCTIONS["sdpa"]
        return function(self, q, q.sin(), q * 2, mask, scaling=0.7, **self.options)[0]


@pytest.mark.parametrize("case", ["causal", "hidden", "added", "a bias of positions"])
def test_attention_by_the_interface(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs, x = Interface(), values(2, 4, 6)
    mask = {"hidden": torch.ones(2, 1, 4, 4, dtype=torch.bool).tril(), "added": values(2, 1, 4, 4)}.get(case)
    ours = copy.deepcopy(theirs)
    assert nn.patch(ours).replaced[""] == ("Interface", "attention")
    calls, attention = [], triplan.functional.attention
    monkeypatch.setattr(triplan.functional, "attention", lambda *a, **k: calls.append(a) or attention(*a, **k))
    ours.options = {"position_bias": values(4)} if case == "a bias of positions" else {}
    expected = trained(theirs, x, mask)
    assert not calls
    torch.testing.assert_close(trained(ours, x, mask), expected)
    assert len(calls) == (case != "a bias of positions")
    torch.testing.assert_close(torch.compile(ours, backend="eager")(x, mask), expected[0])


product, SHARPNESS = F.scaled_dot_product_attention, 0.7


class Direct(torch.nn.Module):
    """Calls torch's function as timm's models do, or by a name of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = torch.nn.Linear(6, 6, dtype=F64)

    def forward(self, x: Tensor, mask: Tensor | None = None, *, sharpness: float | None = None) -> Tensor:
        q = self.proj(x).view(2, 4, 3, 2).transpose(1, 2)
        scale = SHARPNESS if sharpness is None else sharpness
        first = F.scaled_dot_product_attention(q, q.sin(), q * 2, attn_mask=mask, is_causal=mask is None, scale=scale)
        return super().forward(first) if mask is NotImplemented else first + product(q, first, q, mask)


@pytest.mark.parametrize("hidden", [False, True])
def test_attention_that_a_module_calls_by_itself(hidden: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs, x = Direct(), values(2, 4, 6)
    mask = torch.ones(2, 1, 4, 4, dtype=torch.bool).tril() if hidden else None
    ours = copy.deepcopy(theirs)
    assert nn.patch(ours).replaced[""] == ("Direct", "attention")
    calls, attention = [], triplan.functional.scaled_dot_product_attention
    counted = lambda *a, **k: calls.append(a) or attention(*a, **k)  # noqa: E731
    monkeypatch.setattr(triplan.functional, "scaled_dot_product_attention", counted)
    expected = trained(theirs, x, mask)
    assert not calls
    torch.testing.assert_close(trained(ours, x, mask), expected)
    assert len(calls) == 2
    assert F.scaled_dot_product_attention is product  # is torch's still
    torch.testing.assert_close(torch.compile(ours, backend="eager")(x, mask), expected[0])
    monkeypatch.setitem(globals(), "SHARPNESS", 0.3)  # the rest of its module is what it is now
    torch.testing.assert_close(ours(x, mask), theirs(x, mask, sharpness=0.3))
    assert nn.unpatch(ours) == 2
    assert type(ours) is Direct


class Counting(Direct):
    """What it assigns must be seen by others."""

    def forward(self, x: Tensor, mask: Tensor | None = None, *, sharpness: float | None = None) -> Tensor:
        global SHARPNESS
        SHARPNESS += 0.0
        q = self.proj(x).view(2, 4, 3, 2).transpose(1, 2)
        return F.scaled_dot_product_attention(q, q, q, attn_mask=mask)


def test_attention_in_a_forward_that_assigns_globals_is_left() -> None:
    model = Counting()
    assert "" not in nn.patch(model).replaced
    assert type(model) is Counting


def tables(repeats: bool = True) -> tuple[Tensor, Tensor]:
    angles = values(1, 4, 6)
    angles = torch.cat((angles[..., :3],) * 2, -1) if repeats else angles
    return angles.cos(), angles.sin()


@pytest.fixture
def rotations(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """The queries that ours has rotated."""
    found, rotary = list[Tensor](), triplan.functional.rotary
    monkeypatch.setattr(triplan.functional, "rotary", lambda *given: found.append(given[0]) or rotary(*given))
    return found


def test_attention_rotates_by_ours(rotations: list[Tensor]) -> None:
    theirs, x = Attention(), values(2, 4, 12)
    ours = copy.deepcopy(theirs)
    assert nn.patch(ours).replaced[""] == ("Attention", "rotary")
    expected = trained(theirs, x, tables())
    assert not rotations  # the function is the same in both, and only the patched module asks for ours
    torch.testing.assert_close(trained(ours, x, tables()), expected)
    assert len(rotations) == 1
    compiled = torch.compile(ours, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(x, tables()), expected[0])
    nn.unpatch(ours)
    torch.testing.assert_close(ours(x, tables()), expected[0])
    assert len(rotations) == 1


@pytest.mark.parametrize("case", ["other values", "another dtype", "learned", "more for each", "by name"])
def test_rotations_that_ours_lacks_are_left(case: str, rotations: list[Tensor]) -> None:
    theirs, x, given = Attention(), values(2, 4, 12), tables(case != "other values")
    theirs.named = case == "by name"
    if case == "another dtype":
        given = given[0].float(), given[1].float()
    elif case == "learned":
        given[0].requires_grad_()
    elif case == "more for each":
        x = values(2, 3, 12)
        given = tuple(t[:, :1] for t in given)  # type: ignore[assignment]
    ours = copy.deepcopy(theirs)
    nn.patch(ours)
    torch.testing.assert_close(ours(x, given), theirs(x, given))
    assert not rotations


def test_attention_that_rotates_in_another_way_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    class Interleaved(Attention):
        """Its own class, whose function is found anew."""

        def forward(self, x: Tensor, tables: tuple[Tensor, Tensor]) -> Any:
            return apply_rotary_pos_emb(x, x, *tables)

    def other(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Any:
        return tuple(t * cos.unsqueeze(1) + torch.stack((-t[..., 1::2], t[..., ::2]), -1).flatten(-2) for t in (q, k))

    monkeypatch.setitem(globals(), "apply_rotary_pos_emb", other)
    assert "" not in nn.patch(Interleaved()).replaced
    assert globals()["apply_rotary_pos_emb"] is other


class Language(torch.nn.Module):
    """Tied, partly frozen, shared and hooked."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(11, 8)
        self.norm = torch.nn.LayerNorm(8)
        shared = torch.nn.Sequential(torch.nn.Linear(8, 12), torch.nn.GELU(), torch.nn.Linear(12, 8))
        self.layers = torch.nn.ModuleList([shared, LlamaRMSNorm(8), shared])
        self.dropout = torch.nn.Dropout(0.5).eval()
        self.head = torch.nn.Linear(8, 11, bias=False)
        self.head.weight = self.table.weight
        self.loss = torch.nn.CrossEntropyLoss()
        shared[0].bias.requires_grad_(False)
        self.seen: list[str] = []
        self.norm.register_forward_hook(self.doubled)
        self.head.register_full_backward_hook(self.passed)

    def doubled(self, module: torch.nn.Module, given: object, out: Tensor) -> Tensor:
        self.seen.append("forward")
        return out * 2

    def passed(self, *_: object) -> None:
        self.seen.append("backward")

    def forward(self, tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        x = self.norm(self.table(tokens))
        for layer in self.layers:
            x = x + self.dropout(layer(x))
        logits = self.head(x)
        return logits, self.loss(logits.flatten(0, 1), targets.flatten())


def test_a_model_keeps_its_parameters_hooks_ties_and_flags(device: str) -> None:
    theirs = Language().to(device, F64)
    ours = copy.deepcopy(theirs)
    tokens, targets = (torch.randint(11, (2, 5), device=device) for _ in range(2))
    kept = [(n, id(p), p.requires_grad) for n, p in ours.named_parameters(remove_duplicate=False)]
    types = [type(m) for m in ours.modules()]
    report = nn.patch(ours)
    assert (len(report.replaced), report.left) == (9, {})
    assert kept == [(n, id(p), p.requires_grad) for n, p in ours.named_parameters(remove_duplicate=False)]
    assert ours.head.weight is ours.table.weight
    assert [m.training for m in ours.modules()] == [m.training for m in theirs.modules()]
    for _ in range(4):  # and replayed
        steps = []
        for model in (ours, theirs):
            model.zero_grad()
            logits, loss = model(tokens, targets)
            loss.backward()
            steps.append((logits, loss, [p.grad for p in model.parameters()]))
            torch.optim.SGD(model.parameters(), 0.1).step()
        torch.testing.assert_close(*steps)
    assert ours.seen == ["forward", "backward"] * 4
    theirs.load_state_dict(ours.state_dict())
    assert nn.patch(ours).replaced == {}  # nothing is left to do
    assert nn.unpatch(copy.deepcopy(ours)) == nn.unpatch(ours) == 9
    assert nn.unpatch(ours) == 0
    assert [type(m) for m in ours.modules()] == types
    assert torch.equal(ours(tokens, targets)[0], theirs(tokens, targets)[0])


@pytest.mark.usefixtures("fresh_compiler")
def test_a_patched_model_compiles_whole() -> None:
    model, x = torch.nn.Sequential(torch.nn.Linear(6, 6), LlamaRMSNorm(6), torch.nn.ReLU()), torch.randn(5, 6)
    nn.patch(model)
    assert torch.equal(torch.compile(model, fullgraph=True, backend="aot_eager")(x), model(x))


class Scaled(torch.nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


def overridden() -> torch.nn.Module:
    module = torch.nn.Linear(6, 6)
    module.forward = lambda input: input  # type: ignore[method-assign]
    return module


def holding() -> torch.nn.Module:
    module = type("Holding", (torch.nn.Dropout,), {})()
    module.inner = torch.nn.Bilinear(6, 6, 6)
    return module


class Packed(torch.nn.Parameter):
    """As quantised and sharded parameters are."""


def packed() -> torch.nn.Module:
    module = torch.nn.LayerNorm(6, bias=False)
    module.weight = Packed(module.weight.detach())
    return module


LEFT: dict[str, tuple[Callable[[], torch.nn.Module], str]] = {
    "subclass": (lambda: Scaled(6, 6), "a subclass of torch.nn.Linear"),
    "holding": (holding, "a subclass of torch.nn.Dropout"),
    "parametrised": (
        lambda: torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(6, 6, bias=False)),
        "a subclass of",
    ),
    "lazy": (lambda: torch.nn.LazyLinear(6), "a subclass of torch.nn.Linear"),
    "forward": (overridden, "its forward was replaced"),
    "padding": (lambda: torch.nn.Conv1d(6, 6, 3, padding=1, padding_mode="circular"), "padding_mode = 'circular'"),
    "complex": (lambda: torch.nn.Linear(6, 6, dtype=torch.complex64), "weight is torch.complex64"),
    "packed": (packed, "weight is a Packed"),
    "sparse": (lambda: torch.nn.Embedding(6, 6, sparse=True), "sparse = True"),
    "wide": (lambda: torch.nn.MultiheadAttention(320, 1), "heads are 320 wide"),
    "axis": (lambda: torch.nn.Softmax(), "dim = None"),
    "empty": (lambda: torch.nn.AdaptiveAvgPool2d((0, 2)), r"output_size = \(0, 2\)"),
    "mode": (lambda: torch.nn.Upsample(5, mode="bicubic"), "mode = .bicubic"),
    "unknown": (lambda: torch.nn.Bilinear(6, 6, 6), "no equal in triplan.nn"),
    "ours": (lambda: nn.Linear(6, 6), "is triplan's already"),
}


@pytest.mark.parametrize("case", LEFT)
def test_what_ours_would_refuse_is_left_and_the_report_says_why(case: str) -> None:
    make, why = LEFT[case]
    model = make()
    kind, report = type(model), nn.patch(model)
    assert report.replaced == {} or case == "parametrised"
    assert re.match(why, report.left[""][1])
    assert type(model) is kind
    nn.unpatch(model)
    assert type(model) is kind


def test_a_model_on_another_device_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    model = torch.nn.Sequential(torch.nn.ReLU())  # its input, too, will be there
    monkeypatch.setattr(model, "buffers", lambda: [SimpleNamespace(device=torch.device("mps"))])
    assert nn.patch(model).left == {"0": ("ReLU", "the model is on mps")}


def test_a_class_that_changed_again_is_not_lost() -> None:
    model = torch.nn.Sequential(torch.nn.ReLU(), torch.nn.Linear(6, 6))
    nn.patch(model)
    torch.nn.utils.parametrizations.weight_norm(model[1])
    with pytest.raises(RuntimeError, match=r"'1'.* changed since"):
        nn.unpatch(model)
    assert type(model[0]) is nn.ReLU
    torch.nn.utils.parametrize.remove_parametrizations(model[1], "weight")
    assert nn.unpatch(model) == 2


def test_the_report_is_a_table() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.Linear(6, 6), torch.nn.ReLU(), torch.nn.RReLU())
    report = nn.patch(model, skip=lambda path, module: path == "1")
    assert str(report).splitlines() == [
        "2 of 4 modules replaced",
        "  replaced  count  by triplan.nn's  first",
        "  Linear        1  Linear           0",
        "  ReLU          1  ReLU             2",
        "  left    count  because                 first",
        "  Linear      1  skipped                 1",
        "  RReLU       1  no equal in triplan.nn  3",
    ]
    with pytest.raises(TypeError, match="not function"):
        nn.patch(lambda x: x)  # type: ignore[arg-type]


def test_a_thousand_modules_take_less_than_a_second() -> None:
    parts = (lambda: torch.nn.Linear(8, 8), torch.nn.ReLU, lambda: LlamaRMSNorm(64), lambda: torch.nn.LayerNorm(8))
    model = torch.nn.Sequential(*(part() for _ in range(250) for part in parts))
    start = time.process_time()
    assert len(nn.patch(model).replaced) == 1000
    assert time.process_time() - start < 1
    assert len({type(part) for part in model}) == len(parts)


# --- models of libraries, where these are installed ---

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 64}
LLAMA = {**SIZES, "num_key_value_heads": 2, "head_dim": 8}
BERT = {**SIZES, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 64, "bos_token_id": 0, "eos_token_id": 0}
VIT = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 4, "num_classes": 10}
#: The library, the model, and how many of its modules stay torch's.
MODELS: dict[str, tuple[str, Callable[[Any], torch.nn.Module], int]] = {
    "llama": ("transformers", lambda t: t.LlamaForCausalLM(t.LlamaConfig(**LLAMA)), 1),
    "qwen3": ("transformers", lambda t: t.Qwen3ForCausalLM(t.Qwen3Config(**LLAMA)), 1),
    "gemma": ("transformers", lambda t: t.GemmaForCausalLM(t.GemmaConfig(**LLAMA)), 2),
    "gpt2": ("transformers", lambda t: t.GPT2LMHeadModel(t.GPT2Config(**GPT2)).eval(), 0),
    "bert": ("transformers", lambda t: t.BertForMaskedLM(t.BertConfig(**BERT)), 1),
    "resnet50": ("torchvision", lambda t: t.models.resnet50(num_classes=10), 0),
    "vit": ("timm", lambda t: t.models.vision_transformer.VisionTransformer(**VIT), 6),
}


#: What is one launch of several modules.
BLOCKS = {
    "llama": {"rotary, attention", "gated SiLU"},
    "qwen3": {"rotary, attention", "gated SiLU"},
    "gemma": {"rotary, attention", "gated GELU(approximate='tanh')"},
    "gpt2": {"attention"},
    "bert": {"attention"},
    "resnet50": {"batch_norm_relu"},
    "vit": {"attention"},
}


@pytest.mark.parametrize("name", MODELS)
def test_models_of_libraries_train_as_without_ours(name: str, device: str) -> None:
    library, make, left = MODELS[name]
    theirs = make(pytest.importorskip(library)).to(device, F64)
    ours = copy.deepcopy(theirs)
    report = nn.patch(ours)
    assert len(report.left) <= left, str(report)
    blocks = {
        text
        for _, text in report.replaced.values()
        if text.startswith(("attention", "batch_norm_relu", "gated", "rotary"))
    }
    assert blocks == BLOCKS.get(name, set())
    found = []
    tokens, images = torch.randint(1, 64, (2, 9), device=device), values(4, 3, 64, 64).to(device)
    for model in (ours, theirs):
        if library == "transformers":
            out = model(input_ids=tokens, labels=tokens)
            logits, loss = out.logits, out.loss
        else:
            logits = model(images if name == "resnet50" else images[..., :32, :32])
            loss = torch.nn.functional.cross_entropy(logits, torch.arange(4, device=device))
        loss.backward()
        found.append((logits, loss, [p.grad for p in model.parameters()]))
    # RMSNorms of transformers are computed in f32, of whatever dtype the model is: then f32's tolerance.
    rounded = any("RMSNorm" in kind for kind, _ in report.replaced.values())
    torch.testing.assert_close(*found, **({"rtol": 1.3e-6, "atol": 1e-5} if rounded else {}))
    if name == "llama":
        words = [model.generate(tokens, max_new_tokens=8, do_sample=False) for model in (ours, theirs)]
        assert torch.equal(*words)
