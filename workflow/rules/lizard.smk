# Lizard: An Efficient Linearization Framework for Large Language Models (arXiv 2507.09025).


rule lizard_figure5:
    """Lizard Figure 5: throughput and memory of generation against the length of the input."""
    input:
        EFFICIENCY,
        "workflow/papers/lizard.yaml",
    output:
        "results/lizard/figure5.pdf",
        "results/lizard/figure5.png",
        "results/lizard/figure5.claims.csv",
        "results/lizard/figure5.provenance.json",
    log:
        "results/logs/lizard.figure5.log",
    params:
        code=code_hash(["relinear.draw.lizard"]),
    shell:
        "{RELINEAR} render lizard figure5 {OPTIONS} 2>&1 | ({TEE} {log})"
