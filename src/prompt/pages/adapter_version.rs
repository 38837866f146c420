//! Which adapters captured state belongs to: pages of an earlier version are refused.

/// The adapters that a prompt was captured under.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct AdapterVersion {
    /// The policy's name: `policy` or `reference`.
    pub policy: &'static str,
    /// Its version: updates made so far.
    pub version: u64,
}

impl std::fmt::Display for AdapterVersion {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} version {}", self.policy, self.version)
    }
}
