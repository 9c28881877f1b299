"""What is done to images for classification: decoding, crops, augmentation, mixing."""
