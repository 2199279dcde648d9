"""Starts ``python -m itercast.extras.published.ablation``; its processes import no main."""

from itercast.extras.programs import run_program
from itercast.extras.published.ablation.ablate import main

run_program(main)
