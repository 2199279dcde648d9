"""Steps under parallel plans as torch runs them, to be measured with one process per rank."""
