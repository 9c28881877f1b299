"""Transforms of images for classification: decoding, crops, augmentation, mixing."""
