"""Laws of the training loop: its arithmetic, the errors that stop it, and results without a trace of
interruptions."""

import json
import math
import pickle
import shutil
from pathlib import Path

import pytest
import torch
from torch import nn

from relinear.errors import UserError
from relinear.files import sha256
from relinear.train import checkpoint as module
from relinear.train.loop import WINDOW, CollapseError, rate, train

RECIPE = {"betas": (0.9, 0.999), "weight_decay": 0.01, "warmup_ratio": 0.1, "min_lr_ratio": 0.1, "clip": 1.0}
STEPS = 12


class Stop(Exception):
    """The process dies here."""


class Problem:
    """A small regression whose losses draw random numbers, so that a resume that forgets a generator
    shows."""

    def __init__(self):
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
        self.target = torch.randn(4, 3)

    def loss(self, step, die_at=None, terms=1):
        if step == die_at:
            raise Stop
        for i in range(terms):
            x = torch.randn(16, 4)
            yield f"layer_{i}", (self.layers(x) - x @ self.target).square().mean() / terms

    def weights(self):
        return [p.detach().clone() for p in self.layers.parameters()]


def fit(problem, loss, folder, *, steps=STEPS, recipe=None, log=None, resumed=lambda step: None, **more):
    groups = [(list(problem.layers[0].parameters()), 1e-2), (list(problem.layers[2].parameters()), 1e-3)]
    settings = {
        "checkpoint": folder / "checkpoints",
        "checkpoint_seconds": 0,
        "tokens_per_step": 16,
        "name": "distill toy",
    }
    settings |= {"log": log or (lambda metrics, step: None), "resumed": resumed, "memory": lambda: 1}
    train(
        loss,
        groups,
        batches=lambda step: [(step,)],
        steps=steps,
        recipe={**RECIPE, **(recipe or {})},
        **{**settings, **more},
    )
    return problem.weights()


@pytest.mark.parametrize("dies", [[1], [7], [STEPS - 1], [3, 4, 9]])
def test_resuming_equals_never_stopping_to_the_bit(tmp_path, dies):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    whole = Problem()
    expected = fit(whole, whole.loss, tmp_path / "a")
    for at in dies:
        cut = Problem()
        with pytest.raises(Stop):
            fit(cut, lambda step, p=cut, at=at: p.loss(step, die_at=at), tmp_path / "b")
    last, begins = Problem(), []
    torch.manual_seed(99)  # another process would have drawn other numbers by now
    got = fit(last, last.loss, tmp_path / "b", resumed=begins.append)
    assert begins == [dies[-1]], "went on elsewhere than at the last checkpoint"
    for a, b in zip(expected, got, strict=True):
        assert torch.equal(a, b)


def test_a_death_while_a_checkpoint_is_written_leaves_the_one_before(tmp_path, monkeypatch):
    whole = Problem()
    (tmp_path / "a").mkdir()
    expected = fit(whole, whole.loss, tmp_path / "a")
    real = module.save_file

    def dies_half_way(tensors, path, about):
        if not (tmp_path / "checkpoints/00000004").is_dir():
            return real(tensors, path, about)
        path.write_bytes(b"half a checkpoi")
        raise Stop

    with monkeypatch.context() as patch, pytest.raises(Stop):
        patch.setattr(module, "save_file", dies_half_way)
        cut = Problem()
        fit(cut, cut.loss, tmp_path)
    last, begins = Problem(), []
    got = fit(last, last.loss, tmp_path, resumed=begins.append)
    assert begins == [4]
    assert all(torch.equal(a, b) for a, b in zip(expected, got, strict=True))


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0x55
    path.write_bytes(data)


FILES = ("rank-0.safetensors", "state.json", "files.json", "history.jsonl")
DAMAGES = {"cut": cut, "emptied": lambda path: path.write_bytes(b""), "flipped": flip, "deleted": Path.unlink}


def stopped(folder, at=7):
    """A training that died before a step, with its history, and the checkpoints it left."""
    problem, history = Problem(), folder / "history.jsonl"

    def log(metrics, step):
        with history.open("a") as file:
            file.write(f"{step}\n")

    with pytest.raises(Stop):
        fit(problem, lambda step: problem.loss(step, die_at=at), folder, beside=(history,), log=log)
    return history


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("file", FILES)
def test_of_a_broken_checkpoint_the_one_before_is_taken_and_the_result_is_the_same(
    tmp_path, capsys, file, damage
):
    whole = Problem()
    expected = fit(whole, whole.loss, tmp_path / "whole")
    history = stopped(tmp_path)
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["00000006", "00000007"]
    DAMAGES[damage](tmp_path / "checkpoints/00000007" / file)
    last, begins = Problem(), []
    got = fit(last, last.loss, tmp_path, resumed=begins.append, beside=(history,))
    assert begins == [6]
    assert all(torch.equal(a, b) for a, b in zip(expected, got, strict=True))
    said = capsys.readouterr()
    [told] = [line for line in said.err.splitlines() if "is broken" in line]
    assert "checkpoints/00000007 is broken (" in told and told.endswith("goes on from the one before")
    assert "goes on at step 6 of 12" in said.out


def test_without_a_whole_checkpoint_training_begins_anew_and_says_so(tmp_path, capsys):
    history = stopped(tmp_path)
    for path in (tmp_path / "checkpoints").glob("*/files.json"):
        cut(path)
    last, begins = Problem(), []
    fit(
        last,
        last.loss,
        tmp_path,
        resumed=lambda step: begins.append((step, history.exists())),
        beside=(history,),
    )
    assert begins == [(0, False)]
    assert [
        line.rpartition("; ")[2] for line in capsys.readouterr().err.splitlines() if "is broken" in line
    ] == [
        "training goes on from the one before",
        "training begins anew",
    ]


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_history_is_the_one_of_the_checkpoint(tmp_path, damage):
    """The history is restored from the checkpoint, even if its file lost lines since."""
    history = stopped(tmp_path)
    DAMAGES[damage](history)
    last, seen = Problem(), []
    fit(
        last,
        last.loss,
        tmp_path,
        resumed=lambda step: seen.append((step, history.read_text())),
        beside=(history,),
    )
    assert seen == [(7, "".join(f"{step}\n" for step in range(7)))]


def test_a_pickle_in_a_checkpoint_is_never_run(tmp_path, capsys):
    """With a hash that fits, and in the place of files of earlier versions, too."""

    class Evil:
        def __reduce__(self):
            return Path.touch, (tmp_path / "PWNED",)

    stopped(tmp_path)
    for path in (
        tmp_path / "checkpoint.pt",
        tmp_path / "shards.7/.metadata",
        *(tmp_path / "checkpoints").glob("*/rank-0.safetensors"),
    ):
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(pickle.dumps(Evil()))
    for path in (tmp_path / "checkpoints").glob("*/files.json"):
        hashes = json.loads(path.read_text())
        path.write_text(
            json.dumps(hashes | {"rank-0.safetensors": sha256(path.with_name("rank-0.safetensors"))})
        )
    last, begins = Problem(), []
    fit(last, last.loss, tmp_path, resumed=begins.append)
    assert begins == [0] and "rank-0.safetensors is no whole safetensors file" in capsys.readouterr().err
    assert not (tmp_path / "PWNED").exists()


def test_a_checkpoint_of_another_model_is_refused(tmp_path):
    cut = Problem()
    with pytest.raises(Stop):
        fit(cut, lambda step: cut.loss(step, die_at=3), tmp_path)
    other = Problem()
    other.layers[0] = nn.Linear(4, 8, bias=False)
    with pytest.raises(UserError, match="parameters"):
        fit(other, other.loss, tmp_path)


def test_checkpoints_come_at_their_interval(tmp_path):
    problem = Problem()
    fit(problem, problem.loss, tmp_path, checkpoint_seconds=3600)
    assert list(tmp_path.iterdir()) == []


def test_schedule_warms_up_then_falls_on_a_cosine_to_its_floor():
    steps, warmup, floor = 100, 0.1, 0.2
    rates = [rate(s, steps, warmup, floor) for s in range(steps)]
    assert rates[:10] == pytest.approx([(s + 1) / 10 for s in range(10)])
    assert rates[10] == 1.0
    assert rates[55] == pytest.approx((1 + floor) / 2), "half way down at half time"
    assert all(a > b for a, b in zip(rates[10:], rates[11:], strict=False))
    assert floor < rates[-1] < floor + 0.01
    assert rate(0, 1, 0.1, 0.0) == rate(0, 5, 0.0, 0.0) == 1.0, (
        "a single step, and no warm-up at all, train at the peak rate"
    )


def test_each_group_is_trained_at_its_own_peak_times_the_schedule(tmp_path, monkeypatch):
    used, logged = [], []
    step = torch.optim.AdamW.step

    def spy(self, *args, **kwargs):
        used.append([g["lr"] for g in self.param_groups])
        return step(self, *args, **kwargs)

    monkeypatch.setattr(torch.optim.AdamW, "step", spy)
    problem = Problem()
    fit(problem, problem.loss, tmp_path, log=lambda metrics, step: logged.append(metrics["lr"]))
    factors = [rate(s, STEPS, RECIPE["warmup_ratio"], RECIPE["min_lr_ratio"]) for s in range(STEPS)]
    assert used == [pytest.approx([1e-2 * f, 1e-3 * f]) for f in factors]
    assert logged == pytest.approx([1e-2 * f for f in factors])


def test_every_step_is_logged_once_and_in_order(tmp_path):
    problem, log = Problem(), []
    fit(
        problem,
        lambda step: problem.loss(step, terms=2),
        tmp_path,
        log=lambda metrics, step: log.append((step, metrics)),
    )
    assert [step for step, _ in log] == list(range(STEPS))
    for _, metrics in log:
        assert {"loss", "lr", "grad_norm", "tokens_per_second", "memory_bytes", "terms"} <= metrics.keys()
        assert metrics["loss"] == pytest.approx(sum(metrics["terms"].values()))
    assert log[-1][1]["loss"] < log[0][1]["loss"]


def test_accumulated_micro_batches_equal_the_larger_batch(tmp_path):
    data = torch.randn(STEPS, 8, 4, generator=torch.Generator().manual_seed(1))

    def loss(problem, parts):
        def of(step):
            for x in data[step].chunk(parts):
                yield "lm", (problem.layers(x) - x @ problem.target).square().mean() / parts

        return of

    weights, logs = [], []
    for parts in (1, 4):
        problem, log = Problem(), []
        weights.append(
            fit(
                problem,
                loss(problem, parts),
                tmp_path,
                checkpoint_seconds=3600,
                log=lambda m, s, log=log: log.append((m["loss"], m["grad_norm"])),
            )
        )
        logs.append(log)
    assert logs[0] == [pytest.approx(x, rel=1e-5) for x in logs[1]]
    for one, many in zip(*weights, strict=True):
        torch.testing.assert_close(one, many, rtol=1e-4, atol=1e-5)


def test_gradients_are_scaled_as_told_and_then_clipped(tmp_path):
    norms, losses = [], []
    for scale in (1.0, 1000.0):
        problem = Problem()

        def note(metrics, step, problem=problem):
            clipped = torch.stack([p.grad.norm() for p in problem.layers.parameters()]).norm().item()
            assert clipped == pytest.approx(0.01, rel=1e-3)
            norms.append(metrics["grad_norm"])
            losses.append(metrics["loss"])

        fit(problem, problem.loss, tmp_path, steps=1, loss_scale=scale, recipe={"clip": 0.01}, log=note)
    assert norms[1] == pytest.approx(1000 * norms[0], rel=1e-4)
    assert losses[0] == losses[1], "the loss is logged unscaled"


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_stops_the_run_and_names_the_step(tmp_path, bad):
    problem = Problem()

    def loss(step):
        for name, value in problem.loss(step):
            yield name, value * (bad if step == 5 else 1.0)

    with pytest.raises(FloatingPointError, match=rf"distill toy: loss {bad}.* step 5 of {STEPS}"):
        fit(problem, loss, tmp_path)
    assert all(p.isfinite().all() for p in problem.layers.parameters()), "the bad step was taken"
    with pytest.raises(FloatingPointError, match="step 5"):  # nor does the same command get past it
        again = Problem()
        fit(again, lambda step: ((n, v * (bad if step == 5 else 1.0)) for n, v in again.loss(step)), tmp_path)


def test_a_gradient_that_is_not_finite_stops_the_run(tmp_path):
    problem = Problem()

    def loss(step):
        w = problem.layers[0].weight
        yield "lm", (w * 0).clamp(min=0).sqrt().sum() if step == 2 else w.square().sum()

    with pytest.raises(FloatingPointError, match="gradient norm nan at step 2"):
        fit(problem, loss, tmp_path)


def steady(problem, values):
    """Losses of the given size."""
    return lambda step: iter([("lm", problem.layers[0].weight.sum() * 0 + values(step))])


def test_a_model_that_falls_to_chance_stops_the_run(tmp_path):
    problem, log = Problem(), []
    with pytest.raises(CollapseError, match=r"began at 3\.000 and is 4\.250 .* chance \(4\.200") as error:
        fit(
            problem,
            steady(problem, lambda s: 3.0 if s < 10 else 5.0),
            tmp_path,
            steps=100,
            chance=4.2,
            log=lambda m, s: log.append(s),
        )
    assert str(error.value).count("\n") == 0
    assert 10 <= log[-1] < 10 + WINDOW


def test_a_model_that_began_at_chance_or_only_once_touches_it_goes_on(tmp_path):
    for values in (lambda s: 5.0, lambda s: 4.15 if s == 0 else 5.0, lambda s: 5.0 if s == 20 else 3.0):
        problem = Problem()
        fit(problem, steady(problem, values), tmp_path, steps=40, chance=4.2)
        shutil.rmtree(tmp_path / "checkpoints", ignore_errors=True)


def test_a_collapse_is_noticed_across_an_interruption(tmp_path):
    """The losses before the interruption count, so that a run that collapsed does not pass as one that began
    there."""
    problem = Problem()

    def dies(step):
        if step == 12:
            raise Stop
        return steady(problem, lambda s: 3.0 if s < 10 else 5.0)(step)

    with pytest.raises(Stop):
        fit(problem, dies, tmp_path, steps=100, chance=4.2)
    with pytest.raises(CollapseError):
        fit(problem, steady(problem, lambda s: 5.0), tmp_path, steps=100, chance=4.2)
