"""Where images are read from: class folders, shards, and shards on a server."""
