"""What is done with a mixture's experts beyond its layers: routes told and replayed, balance."""
