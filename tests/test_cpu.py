"""What a record says of the processor."""

import pytest

from relinear.machine import cpu

AMD = (
    "processor\t: 0\nmodel name\t: AMD EPYC 9B14\nflags\t\t: fpu avx2 avx512f avx512_bf16"
    " sse2\n\nprocessor\t: 1\nflags\t\t: avx2\n"
)
ARM = "processor\t: 0\nFeatures\t: fp asimd sve bf16 i8mm\nCPU part\t: 0xd40\n"


@pytest.mark.parametrize(
    ("told", "model", "instructions"),
    [(AMD, "AMD EPYC 9B14", "avx2 avx512f avx512_bf16"), (ARM, None, "asimd sve bf16")],
)
def test_the_model_and_the_instructions_that_decide_its_precision(
    tmp_path, monkeypatch, told, model, instructions
):
    (tmp_path / "cpuinfo").write_text(told)
    monkeypatch.setattr(cpu, "INFO", tmp_path / "cpuinfo")
    monkeypatch.setattr(cpu.platform, "processor", lambda: "")
    monkeypatch.setattr(cpu.platform, "machine", lambda: "aarch64")
    assert cpu.model() == (model or "aarch64")
    assert cpu.instructions() == instructions


def test_a_system_that_says_nothing_has_its_architecture(tmp_path, monkeypatch):
    monkeypatch.setattr(cpu, "INFO", tmp_path / "absent")
    assert cpu.model()
    assert cpu.instructions() == ""
