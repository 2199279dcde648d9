"""Entry point of ``python3 -m itercast.microbench.campaign``."""

from itercast.microbench.campaign.campaign import main

main()
