"""Vision towers and image processors of image-text models."""
