"""Arms of equal bytes: states that are set by the teacher's attention beyond the window, and the divergence
from the teacher as a loss."""

import json
import math

import pytest
import torch
import torch.nn.functional as F
from test_compiled import Stop
from test_finetune import LENGTH, inputs, job  # noqa: F401
from test_laws import one_layer
from test_state_bytes import QWEN, SMOLLM2, layer

from relinear import linearize
from relinear.attention import load, options
from relinear.attention._base import Inputs, softmax_weights
from relinear.errors import UserError
from relinear.get.packed import Packed, batch_indices
from relinear.linearize.assemble import assemble
from relinear.measure.state_bytes import state_bytes
from relinear.plan.catalogue import read_models, read_runs
from relinear.plan.held import Holds, positions
from relinear.plan.job import Job, Link
from relinear.plan.plan import Plan
from relinear.plan.strict import ConfigError
from relinear.stages import _training
from relinear.stages.distill import Options as DistillOptions
from relinear.stages.finetune import Options
from relinear.train import distill, finetune

WINDOW, SINKS, TOKENS = 8, 2, 60


def calibrated(**given):
    """A method after its calibration, what it found, and its inputs."""
    _, x = one_layer(("delta", {}), TOKENS)
    heads = one_layer(("delta", {}), TOKENS)[0].heads
    method = load("delta")(heads, options("delta", {"window": WINDOW, "sinks": SINKS} | given)).double()
    return method, method.calibrate(x), x


@pytest.mark.parametrize("decay", ["head", "channel", "step"])
@pytest.mark.parametrize("per", ["key_head", "query_head"])
def test_half_lives_are_the_mean_distance_of_attention_beyond_window_and_sinks(decay, per):
    erase = "none" if decay == "step" else "tied"
    method, found, x = calibrated(decay=decay, state_per=per, erase=erase)
    weights = softmax_weights(x, method.heads)
    heads = method.heads.heads // method.states
    wanted = []
    for state in range(method.states):
        mass = far = 0.0
        for b in range(weights.shape[0]):
            for h in range(state * heads, (state + 1) * heads):
                for i in range(TOKENS):
                    for j in range(SINKS, i - WINDOW + 1):
                        mass += weights[b, h, i, j].item()
                        far += weights[b, h, i, j].item() * (i - j)
        wanted.append(max(far / mass, 16.0))
    assert found["half_lives"] == pytest.approx(wanted, rel=1e-5)
    g = method._paced(x, x.x)["log_decay"]
    for state, half_life in enumerate(wanted):
        start = torch.full_like(g[:, :, state], -math.log(2) / half_life)
        torch.testing.assert_close(g[:, :, state], start, rtol=1e-4, atol=0)


def test_the_surest_head_beyond_the_window_writes_most():
    method, found, x = calibrated(state_per="query_head")
    assert min(found["writes"]) == pytest.approx(0.3, abs=1e-5)
    assert max(found["writes"]) == pytest.approx(0.7, abs=1e-5)
    weights = softmax_weights(x, method.heads).double()
    place = torch.arange(TOKENS)
    seen = (place[:, None] - place >= WINDOW) & (place >= SINKS)
    far = weights * seen
    mass = far.sum(-1, keepdim=True)
    entropy = -(far / mass.clamp(min=1e-30)).clamp(min=1e-30).log().mul(far).sum((0, 2, 3)) / mass.sum(
        (0, 2, 3)
    )
    assert sorted(range(method.states), key=entropy.tolist().__getitem__) == sorted(
        range(method.states), key=[-w for w in found["writes"]].__getitem__
    )
    torch.testing.assert_close(
        method._paced(x, x.x)["write"][0, 0], torch.tensor(found["writes"]).double(), rtol=1e-5, atol=1e-6
    )


def test_it_still_starts_as_the_window():
    method, _, x = calibrated()
    assert torch.equal(method(x)[0], method._near(x, None)[0])


def test_padding_before_the_text_changes_nothing():
    method, found, x = calibrated()
    mask = torch.ones(x.x.shape[:2], dtype=torch.bool)
    pad = lambda t: None if t is None else F.pad(t, (0, 0) * (t.dim() - 2) + (5, 0))  # noqa: E731
    padded = Inputs(*(pad(t) for t in x[:6]), F.pad(mask, (5, 0)))
    for name, values in method.calibrate(padded).items():
        assert values == pytest.approx(found[name], rel=1e-5), name


def test_sequences_within_the_window_are_refused():
    method, x = one_layer(("delta", {"window": TOKENS, "sinks": 0}), TOKENS)
    with pytest.raises(
        UserError, match=f"beyond a window of {TOKENS} and 0 sinks; got sequences of {TOKENS}"
    ):
        method.calibrate(x)


def transfer(inputs, folder, calibrate=64):  # noqa: F811
    recipe = DistillOptions(data="text", lr=1e-2, loss="mse", calibrate=calibrate)
    settings = {
        "method": "delta",
        "recipe": recipe.model_dump(exclude=_training.ELSEWHERE),
        "budget": _training.Budget(epochs=1, seq_len=LENGTH, batch_size=2, accumulate=1).model_dump(),
    }
    (folder / "out").mkdir(parents=True, exist_ok=True)
    parents = {name: inputs / name for name in ("model", "text")}
    link = Link("delta", {"window": 8, "sinks": 2})
    return Job("distill", settings, parents, folder / "out", folder, links=(link,), dtype="float32")


def dying(monkeypatch, after):
    """The optimiser's step, which dies after so many."""
    steps, real = [], torch.optim.AdamW.step

    def step(self, *given, **more):
        if len(steps) == after:
            raise Stop
        steps.append(None)
        return real(self, *given, **more)

    monkeypatch.setattr(torch.optim.AdamW, "step", step)


@pytest.mark.parametrize("stage", ["distill", "kl"])
def test_a_training_that_dies_goes_on_to_the_bit(inputs, tmp_path, monkeypatch, stage):  # noqa: F811
    def asked(folder):
        if stage == "distill":
            return distill, transfer(inputs, folder)
        made = folder.exists()
        link = Link("delta", {"window": 8, "sinks": 2})
        if made:
            (folder / "out").rmdir()
        given = job(inputs, folder, "method", link, kl=0.5, kl_beyond=8)
        return finetune, given

    module, whole = asked(tmp_path / "whole")
    found = module.work(whole)
    module, first = asked(tmp_path / "part")
    first.checkpoint_seconds = 0
    with monkeypatch.context() as m:
        dying(m, 3)
        with pytest.raises(Stop):
            module.work(first)
    module, again = asked(tmp_path / "part")
    again.checkpoint_seconds = 0
    assert module.work(again) == found
    name = "method.safetensors"
    assert (whole.out / name).read_bytes() == (again.out / name).read_bytes()
    losses = [json.loads(line)["loss"] for line in again.history.read_text().splitlines()]
    assert losses == [json.loads(line)["loss"] for line in whole.history.read_text().splitlines()]


def test_a_transfer_records_what_it_was_set_to(inputs, tmp_path):  # noqa: F811
    metrics = distill.work(transfer(inputs, tmp_path))
    assert [sorted(found) for found in metrics["calibrated"]] == [["far", "half_lives", "writes"]] * 2
    assert all(0 < far < 1 for found in metrics["calibrated"] for far in found["far"])


@pytest.mark.parametrize(("share", "within"), [(1.0, 0.1), (0.25, 0.0)])
def test_the_loss_is_the_weighted_divergence_and_the_rest_the_next_token_s(inputs, tmp_path, share, within):  # noqa: F811
    link = Link("window", {"window": 4, "sinks": 0})
    asked = job(inputs, tmp_path, "lora", link, kl=share, kl_beyond=16, kl_within=within)
    finetune.work(asked)
    first = json.loads(asked.history.read_text().splitlines()[0])["loss"]
    text = Packed(inputs / "text", "train", LENGTH)
    ids = torch.stack(
        [text.sequence(i)[0] for i in batch_indices(0, n=len(text), batch_size=2, seed=asked.seed)]
    )
    with torch.no_grad():
        theirs = assemble(inputs / "model", [])(ids).logits.log_softmax(-1)
        ours = assemble(inputs / "model", [link])(ids, use_cache=False).logits.log_softmax(-1)
    kl = (theirs.exp() * (theirs - ours)).sum(-1)
    weights = torch.tensor([within] * 16 + [1.0] * (LENGTH - 16))
    nll = -ours[:, :-1].gather(-1, ids[:, 1:, None]).mean()
    wanted = share * (kl * weights).sum() / (2 * weights.sum()) + (1 - share) * nll
    assert kl[:, 16:].max() > 1e-3 and first == pytest.approx(wanted.item(), rel=1e-4)


def test_options_of_the_divergence_without_it_are_refused():
    with pytest.raises(ValueError, match="kl_beyond is of the KL divergence from the teacher; got kl 0"):
        Options(data="text", kind="lora", lr=1e-3, kl_beyond=256)


RUNS = read_runs(read_models())
ARMS = [name for name in RUNS if name.startswith("frontier") and "teacher" not in name]


@pytest.mark.parametrize("name", ARMS)
def test_every_arm_holds_the_bytes_that_it_is_compared_at(name):
    """Of 256 positions at SmolLM2's heads, or of the number that its table names."""
    run, layers = RUNS[name], 30
    given = dict(run.options)
    if isinstance(given["window"], list | tuple):
        size = sum(state_bytes(layer(run.method, given | {"window": w}, SMOLLM2), 1) for w in given["window"])
        assert len(given["window"]) == layers
    else:
        size = layers * state_bytes(layer(run.method, given, SMOLLM2), 1)
    of = {128: ("_57", "_124", "_61"), 512: ("_441", "_508", "_512")}
    positions = next((b for b, names in of.items() if any(part in name for part in names)), 256)
    position = 2 * 2 * SMOLLM2.groups * SMOLLM2.dim
    if run.method == "kept":  # scores are no whole positions
        assert 0 < layers * positions * position - size < layers * position / 8
    else:
        assert size == layers * positions * position


GIVEN = {"window": 20, "sinks": 3}


@pytest.mark.parametrize("heads", [SMOLLM2, QWEN], ids=["smollm2", "qwen"])
@pytest.mark.parametrize(
    ("method", "more"),
    [
        ("window", {}),
        ("delta", {}),
        ("delta", {"state_per": "query_head"}),
        ("delta", {"state_dtype": "bfloat16"}),
        ("delta", {"conv": False}),
        ("kept", {"kept": 7}),
    ],
)
def test_what_a_run_holds_is_known_before_torch(method, more, heads):
    at = Holds(positions=1, heads=heads.heads, groups=heads.groups, dim=heads.dim)
    size = state_bytes(layer(method, GIVEN | more, heads), 1)
    run = RUNS["frontier_window_252"].model_copy(update={"method": method, "options": GIVEN | more})
    assert positions(run, at) * 2 * 2 * heads.groups * heads.dim == size
    several = run.model_copy(update={"options": GIVEN | more | {"window": [10, 30]}})
    assert positions(several, at) == positions(run, at)


@pytest.mark.parametrize(
    ("run", "method", "options", "said"),
    [
        ("frontier_window_252", "window", {"window": 253, "sinks": 4}, "holds the bytes of 257 .*1 fewer"),
        ("frontier_state_185", "delta", {"window": 185, "state_per": "query_head"}, "of 384 positions"),
        ("frontier_state_57", "lizard", {}, "method 'lizard' .* possible: window, delta, kept"),
        ("frontier_state_57", "window", {"window": 8, "keep_softmax_layers": [0]}, "does not say what it"),
    ],
)
def test_a_row_of_more_bytes_than_its_table_allows_is_refused(monkeypatch, run, method, options, said):
    plan = Plan(scale="smollm2")
    changed = plan.runs[run].model_copy(update={"method": method, "options": options})
    monkeypatch.setitem(plan.runs, run, changed)
    with pytest.raises(ConfigError, match=f"frontier.yaml: row '{run}'.*{said}"):
        plan.check_artefact(plan.artefacts["comparison_frontier"])


def test_windows_of_layers_are_those_of_the_list(inputs):  # noqa: F811
    model = assemble(inputs / "model", [Link("window", {"window": [4, 9], "sinks": 0})])
    assert [part.method.window for part in model.attention_layers()] == [4, 9]
    with pytest.raises(ValueError, match="got 3 for 2 layers, possible: a list of 2"):
        linearize(assemble(inputs / "model", []), "window", window=[4, 9, 4])
