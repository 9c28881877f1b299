"""What classification and segmentation do differently: losses, meters, evaluation and the views of an image."""
