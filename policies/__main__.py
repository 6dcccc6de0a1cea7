from pulumi_policy import PolicyPack

from policies.pack import NAME, policies

# Starts a server and never returns, which is why nothing else may construct it.
PolicyPack(NAME, policies())
