"""Entry point of ``python -m itercast.eval.ablation``: processes that it starts import no main."""

from itercast.eval.ablation.ablate import main

main()
