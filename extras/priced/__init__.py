"""The command ``itercast price``: forecasts of single ops, as rows of a Parquet file."""
