"""Starting ranks as processes, and watching them until they end."""
