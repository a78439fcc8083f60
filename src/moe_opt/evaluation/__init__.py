"""How much brownout costs in quality and saves in experts read: perplexity, next-token accuracy, multiple choice.

Nothing is imported here, so that the metric module and the reports need no torch: import what you use, for instance
`from moe_opt.evaluation.grid import evaluate_grid`.
"""
