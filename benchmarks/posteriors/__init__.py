"""Certified targets: posteriors of the kinds that statisticians use, with references from long runs of NUTS.

python -m benchmarks.posteriors reference [--only NAME]    # writes benchmarks/posteriors/reference.json
python -m benchmarks.posteriors nuts [--only NAME]         # ours against NUTS and MAMS: benchmarks/results/nuts_cpu.json
"""
