# SUPRA: Linearizing Large Language Models (arXiv 2405.06640).


rule supra_figure1:
    """SUPRA Figure 1: memory and time of a token against the number of generated tokens, its middle panel."""
    input:
        EFFICIENCY,
        "workflow/papers/supra.yaml",
    output:
        "results/supra/figure1.pdf",
        "results/supra/figure1.png",
        "results/supra/figure1.claims.csv",
        "results/supra/figure1.provenance.json",
    log:
        "results/logs/supra.figure1.log",
    params:
        code=code_hash(["relinear.draw.supra"]),
    shell:
        "{RELINEAR} render supra figure1 {OPTIONS} 2>&1 | ({TEE} {log})"
