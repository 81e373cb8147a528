# Benchmarks: times and memory on the machine that they run on. No table or figure of a scale asks for them.


# No scale: weights are random, at the papers' own shapes. An interrupted measurement goes on with the rows it has.
rule benchmark:
    """The cost of generating at 7-8B shapes: throughput and memory, on one GPU of 40 GB or more."""
    output:
        "results/efficiency/efficiency.csv",
        "results/efficiency/efficiency.provenance.json",
    log:
        "results/logs/benchmark.log",
    resources:
        gpu=1,
        mem_mb=32000,
        runtime=60,
    params:
        code=code_hash(
            ["relinear.benchmarks.generation"]
            + [
                f"relinear.attention.{method}"
                for method in ("hedgehog", "lizard", "lolcats", "supra")
            ]
        ),
    shell:
        "{PYTHON} relinear.cli benchmark 2>&1 | ({TEE} {log:q})"


rule kernels:
    """The kernels beside their peers at the papers' shapes, on one GPU."""
    output:
        "results/kernels/bench.csv",
        "results/kernels/bench.provenance.json",
        "results/kernels/ratios.md",
    log:
        "results/logs/kernels.log",
    resources:
        gpu=1,
        mem_mb=32000,
        runtime=60,
    shell:
        "{PYTHON} relinear.benchmarks.kernels --out results/kernels --missing 2>&1 | ({TEE} {log:q})"


rule training:
    """Tokens a second and memory of the trainings, on GPUs: `--set-resources training:gpu=4` for four of them."""
    output:
        "results/scaling/scaling.json",
    log:
        "results/logs/training.log",
    resources:
        gpu=1,
        mem_mb=32000,
        runtime=60,
    shell:
        "{PYTHON} relinear.benchmarks.training --gpus {resources.gpu} --out {output:q} 2>&1 | ({TEE} {log:q})"


# Alone on the machine: it takes every core, so that no other job is in its times.
rule decoding:
    """Long generation and long prompts on one core of a CPU: time a token, memory, state."""
    output:
        "results/decoding/decoding.csv",
        "results/decoding/decoding.provenance.json",
    log:
        "results/logs/decoding.log",
    threads: workflow.cores
    resources:
        runtime=180,
    shell:
        "{PYTHON} relinear.benchmarks.decoding --out results/decoding 2>&1 | ({TEE} {log:q})"


rule parity:
    """The laws on a real model: pieces, prefixes, padding and single tokens beside the parallel form, of every method."""
    input:
        lambda wildcards: records([Node("model", plan.run("teacher").model)]),
        text="LICENSE",
    output:
        "results/parity/parity.csv",
        "results/parity/parity.provenance.json",
    log:
        "results/logs/parity.log",
    threads: cores("measure")
    resources:
        mem_mb=MEMORY,
        runtime=60,
    params:
        teacher=lambda wildcards, input: Path(input[0]).parent,
    shell:
        "{PYTHON} relinear.benchmarks.parity {params.teacher:q} --text {input.text:q} --out results/parity --threads {threads} "
        "2>&1 | ({TEE} {log:q})"
