"""What passes and the search ask of a graph: costs of ops and redistributions, conflicts of annotations."""
