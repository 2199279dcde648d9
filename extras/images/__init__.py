"""Images: pooling and resampling, which stand beside convolutions; timm's configurations."""
