//! SHA-256 as hexadecimal text, the form in which digests are compared, stored and printed.

use std::fmt::Write as _;

use sha2::{Digest as _, Sha256};

/// The digest of everything that `hash` has taken in: 64 hexadecimal digits.
#[must_use]
pub fn hex(hash: Sha256) -> String {
    hash.finalize().iter().fold(String::with_capacity(64), |mut digits, byte| {
        // Writing to a text never fails.
        let _ = write!(digits, "{byte:02x}");
        digits
    })
}

/// The digest of `bytes`: 64 hexadecimal digits.
#[must_use]
pub fn sha256_hex(bytes: impl AsRef<[u8]>) -> String {
    hex(Sha256::new_with_prefix(bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_digest_is_that_of_the_standard() {
        // FIPS 180-2, appendix B.1.
        let expected = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";
        assert_eq!(sha256_hex("abc"), expected);
        assert_eq!(hex(Sha256::new_with_prefix("ab").chain_update("c")), expected);
    }
}
