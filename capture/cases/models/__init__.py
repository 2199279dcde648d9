"""The torch modules that cases build."""
