"""Entry point of ``python -m itercast.eval.ablation``: processes that it starts import no main."""

from itercast.eval.ablation.ablate import main
from itercast.eval.progress import run_program

run_program(main)
