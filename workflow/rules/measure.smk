# Measurements: one metric of one run a node, so that a new metric reruns nothing.


rule measure:
    """One measurement of a run, as workflow/measures.yaml names it."""
    input:
        parents("measure"),
        assets("measure"),
    output:
        "<results>/runs/{name}/{measure}/run.json",
        "<results>/runs/{name}/{measure}/metrics.json",
    log:
        "<results>/logs/{name}.{measure}.log",
    priority: 1  # prompts and their tokens are made on the processor, while trainings have the GPU
    threads: cores("measure")
    resources:
        gpu=gpus("measure"),
        mem_mb=MEMORY,
        runtime=minutes("measure"),
    params:
        key=key("measure"),
    shell:
        "{RELINEAR} measure {wildcards.name:q} {wildcards.measure:q} {OPTIONS} --threads {threads} --gpus {resources.gpu} 2>&1 | ({TEE} {log:q})"


# Scale-free: it is of random weights at the papers' own shapes. An interrupted measurement goes on with the rows it has.
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
        "{RELINEAR} benchmark 2>&1 | ({TEE} {log:q})"


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
