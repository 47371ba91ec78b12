"""What processes need of the operating system: locks, private directories, parents' deaths."""
