//! What an address of the endpoint may look like.

use std::net::{Ipv4Addr, Ipv6Addr};

/// Whether `base` is an address with a host and without user or password.
pub(super) fn is_plain(base: &str) -> bool {
    let rest = base.strip_prefix("https://").or_else(|| base.strip_prefix("http://"));
    let host = rest.map(|r| r.split(['/', '?', '#']).next().unwrap_or_default());
    host.is_some_and(|h| !h.is_empty() && !h.contains('@')) && !base.contains(char::is_whitespace)
}

/// An address that lacks its scheme.
pub(super) enum NoScheme {
    /// Of this machine, with the scheme that it needs.
    Local(String),
    /// Of another machine, or no address at all.
    Other,
}

/// Whether `base` has no scheme, and what it would be with one. What is no host of this machine may be a key and is not told.
pub(super) fn without_scheme(base: &str) -> Option<NoScheme> {
    if base.contains("://") || base.contains('@') || base.contains(char::is_whitespace) {
        return None;
    }
    let with = format!("http://{base}");
    let is_local = is_plain(&with) && !is_clear(&with) && base.chars().all(|c| c.is_ascii_graphic());
    Some(if is_local { NoScheme::Local(with) } else { NoScheme::Other })
}

/// Whether what is sent to a plain address, the key with it, crosses a network unencrypted.
pub(super) fn is_clear(base: &str) -> bool {
    let Some(rest) = base.strip_prefix("http://") else { return false };
    let host = rest.split(['/', '?', '#']).next().unwrap_or_default();
    if let Some((host, _)) = host.strip_prefix('[').and_then(|host| host.split_once(']')) {
        return !host.parse::<Ipv6Addr>().is_ok_and(|host| host.is_loopback());
    }
    let host = host.rsplit_once(':').map_or(host, |(host, _)| host);
    !(host == "localhost" || host.parse::<Ipv4Addr>().is_ok_and(|host| host.is_loopback()))
}

/// Whether the host of a plain address is of a private network: an address of such a range, or a name without dots.
pub(super) fn is_private(base: &str) -> bool {
    let rest = base.strip_prefix("https://").or_else(|| base.strip_prefix("http://")).unwrap_or(base);
    let host = rest.split(['/', '?', '#']).next().unwrap_or_default();
    if let Some((host, _)) = host.strip_prefix('[').and_then(|host| host.split_once(']')) {
        return host.parse::<Ipv6Addr>().is_ok_and(|host| host.is_unique_local() || host.is_unicast_link_local());
    }
    let host = host.rsplit_once(':').map_or(host, |(host, _)| host);
    match host.parse::<Ipv4Addr>() {
        Ok(host) => host.is_private() || host.is_link_local(),
        // A name of digits and colons alone may be another spelling of a public address.
        Err(_) => !host.contains('.') && host.starts_with(|c: char| c.is_ascii_alphabetic()),
    }
}

/// Whether `path` can be appended to a base address.
pub(super) fn is_path(path: &str) -> bool {
    path.starts_with('/') && !path.contains(|c: char| c.is_whitespace() || c.is_control() || "?#".contains(c))
}

/// A plain address without query, fragment and closing slashes, and without what one of `paths` repeats at its end: the whole
/// path, or a version that the path begins with; that path comes back too.
pub(super) fn cleaned<'a>(base: &'a str, paths: [&'a str; 2]) -> (&'a str, Option<&'a str>) {
    let bare = base.split(['?', '#']).next().unwrap_or_default().trim_end_matches('/');
    for path in paths {
        let before = bare.strip_suffix(path.trim_matches('/')).filter(|_| path.len() > 1);
        if let Some(before) = before.and_then(|before| before.strip_suffix('/')).filter(|before| !before.ends_with('/'))
        {
            return (before.trim_end_matches('/'), Some(path));
        }
    }
    // Before a host there is nothing but the slashes of the scheme.
    let version = |(before, last): &(&str, &str)| !before.ends_with('/') && is_version(last);
    let Some((before, last)) = bare.rsplit_once('/').filter(version) else { return (bare, None) };
    let first = |path: &&str| path.trim_start_matches('/').split('/').next() == Some(last);
    match paths.into_iter().find(first) {
        Some(path) => (before.trim_end_matches('/'), Some(path)),
        None => (bare, None),
    }
}

fn is_version(part: &str) -> bool {
    part.strip_prefix('v').is_some_and(|number| !number.is_empty() && number.bytes().all(|b| b.is_ascii_digit()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_has_a_host_and_no_password() {
        for base in ["example.com", "https://", "https://me:secret@example.com", "ftp://example.com", "http://a b"] {
            assert!(!is_plain(base), "{base}");
        }
        assert!(is_plain("http://127.0.0.1:8080/api"));
    }

    #[test]
    fn only_this_machine_is_reached_without_encryption() {
        for base in
            ["http://127.0.0.1:80/api", "http://127.9.9.9", "http://localhost:1/", "http://[::1]:8/", "https://a"]
        {
            assert!(!is_clear(base), "{base}");
        }
        for base in
            ["http://a.example.com", "http://10.0.0.1:80", "http://127.0.0.1.a.com", "http://[fe80::1]", "http://x"]
        {
            assert!(is_clear(base), "{base}");
        }
    }

    #[test]
    fn a_private_address_is_of_a_private_range_or_a_name_without_dots() {
        for base in [
            "http://10.0.0.1:80",
            "http://192.168.1.9/api",
            "http://172.31.0.1",
            "http://judge:8000",
            "http://[fd00::1]:8",
        ] {
            assert!(is_private(base), "{base}");
        }
        for base in
            ["http://172.32.0.1", "http://8.8.8.8", "http://a.example.com", "http://134744072", "http://[2001:db8::1]"]
        {
            assert!(!is_private(base), "{base}");
        }
    }

    #[test]
    fn a_query_and_a_repeated_version_are_removed() {
        let paths = ["/v1/messages", "/v1/models"];
        for base in ["https://a/api/v1", "https://a/api/v1/", "https://a/api/v1?beta=true"] {
            assert_eq!(cleaned(base, paths), ("https://a/api", Some("/v1/messages")), "{base}");
        }
        assert_eq!(cleaned("https://a/api?x=1", paths), ("https://a/api", None));
        assert_eq!(cleaned("https://a/api#x", paths), ("https://a/api", None));
        assert_eq!(cleaned("https://a/v2/", paths), ("https://a/v2", None));
        assert_eq!(cleaned("https://v1", paths), ("https://v1", None));
        assert_eq!(cleaned("https://a/v1", ["/messages", "/v1/models"]), ("https://a", Some("/v1/models")));
        for base in ["https://a/api/v1/messages", "https://a/api/v1/messages/", "https://a/api/v1/messages?x=1"] {
            assert_eq!(cleaned(base, paths), ("https://a/api", Some("/v1/messages")), "{base}");
        }
        assert_eq!(cleaned("https://a/v1/models", paths), ("https://a", Some("/v1/models")));
        assert_eq!(cleaned("https://messages", ["/messages", "/"]), ("https://messages", None));
    }

    #[test]
    fn an_address_without_a_scheme_gets_one_only_on_this_machine() {
        for (base, with) in [
            ("localhost:8000", Some("http://localhost:8000")),
            ("127.0.0.1:8000/api", Some("http://127.0.0.1:8000/api")),
            ("api.example.com", None),
            ("sk-something", None),
        ] {
            let found = match without_scheme(base) {
                Some(NoScheme::Local(with)) => Some(with),
                Some(NoScheme::Other) => None,
                None => panic!("{base} has a scheme"),
            };
            assert_eq!(found.as_deref(), with, "{base}");
        }
        assert!(without_scheme("https://a").is_none() && without_scheme("me:secret@a").is_none());
    }

    #[test]
    fn a_path_begins_with_a_slash_and_has_no_query() {
        assert!(is_path("/v1/messages"));
        for path in ["v1/messages", "/v1/messages?beta=true", "/v1 /m", "/v1#x"] {
            assert!(!is_path(path), "{path}");
        }
    }
}
