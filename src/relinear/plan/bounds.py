"""The best value that a metric can have."""

# As its readings have it: 1 for a share of items. Of a metric that is not here no best is known.
SHARES = (
    "acc",
    "acc_norm",
    "accuracy",
    "balanced_acc",
    "choice",
    "contains",
    "exact_match",
    "f1",
    "token_accuracy",
)
BEST = dict.fromkeys(SHARES, 1.0)
