"""The command ``itercast import``: measurements that others published, as datasets."""
