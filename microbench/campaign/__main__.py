"""Entry point of ``python3 -m microbench.campaign``, see ``microbench.campaign.campaign``."""

from microbench.campaign.campaign import main

main()
