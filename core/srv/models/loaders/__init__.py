"""Loaders: each fills a model's weights, given as named views, from one kind of source."""
