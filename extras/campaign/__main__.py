"""Entry point of ``python3 -m itercast.extras.campaign``."""

from itercast.extras.campaign.campaign import main

main()
