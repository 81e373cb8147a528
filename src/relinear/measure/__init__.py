"""Metrics: one metric, one file.

A file has a class `Options` and a function `measure`; where it says `NEEDS`, the plan refuses what the metric
cannot be asked of before anything runs (`relinear.plan.options`): `next_token`, `documents`, `tasks`,
`labels`, `pictures`, `shape`, `state`. No key counts `NEEDS`.
"""
