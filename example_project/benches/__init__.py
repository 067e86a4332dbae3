"""Benches, one to a file; ``bench.py`` runs them. They import models: only after ``django.setup()``."""
