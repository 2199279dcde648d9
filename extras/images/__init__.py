"""Ops on images that convolutional networks have beside convolutions: pooling, resampling."""
