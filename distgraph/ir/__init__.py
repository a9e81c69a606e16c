"""The intermediate representation: graphs, meshes, layouts, index rules, and the text form of all of them."""
