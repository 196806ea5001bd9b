"""Headrace: fine-tunes Mixture-of-Experts transformers from Hugging Face checkpoints.

Importing the package loads neither torch nor transformers; its parts import what they need.
"""
