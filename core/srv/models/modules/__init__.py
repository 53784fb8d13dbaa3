"""The torch modules that models are made of: one class for each kind of part of a blueprint (`srv.models.blueprint`).

Must not know any family: what a module does follows from its part. Layers with weight matrices are made by the factory
of the method by which these are stored (`srv.models.layers.factory`).
"""
