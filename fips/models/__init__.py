"""What a transformer looks like to `fips`: where its MLP matrices are, how its blocks run, how they are replaced."""
