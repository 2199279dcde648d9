"""Tables of forecast throughputs for schedulers of clusters, and replays of jobs by them."""
