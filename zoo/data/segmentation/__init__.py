"""Images with label maps: layouts of data sets, class-uniform sampling, transforms, and loaders."""
