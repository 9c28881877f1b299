"""The pages of the documentation, the generator of their tables and the hooks of the site."""
