//! Access control lists that an archive has as text, as [`offshoot_vfs::acl`] has them.
//!
//! Entries are separated by commas or line ends: `user::rw-,user:1000:r--,mask::rw-,...`. GNU tar
//! writes names or numbers of users; libarchive writes names, and behind the permissions the
//! number. What only has a name means nothing in a volume.

use offshoot_vfs::acl::Acl;

/// Why a text is no list.
pub(super) const NOT_A_LIST: &str = "an access control list that is none, or that names its users \
                                     by names and not by numbers";

/// The list that `text` is, as the value of an extended attribute.
pub(super) fn acl_value(text: &[u8]) -> Option<Vec<u8>> {
    let text = std::str::from_utf8(text).ok()?;
    let mut entries = Vec::new();
    for line in text.split([',', '\n']) {
        let line = line.split('#').next().unwrap_or_default().trim();
        if !line.is_empty() {
            entries.push(entry(line)?);
        }
    }
    entries.sort_unstable();
    let mut value = 2_u32.to_le_bytes().to_vec();
    for (tag, id, permissions) in entries {
        value.extend_from_slice(&tag.to_le_bytes());
        value.extend_from_slice(&permissions.to_le_bytes());
        value.extend_from_slice(&id.to_le_bytes());
    }
    Acl::parse(&value).ok().flatten().map(|list| list.to_value())
}

/// Tag, id and permissions of one entry.
fn entry(line: &str) -> Option<(u16, u32, u16)> {
    let mut fields = line.split(':').map(str::trim);
    let (kind, mut who) = (fields.next()?, fields.next()?);
    let mut letters = fields.next();
    // Entries of others and of the mask may go without an empty field.
    if letters.is_none() && matches!(kind, "other" | "o" | "mask" | "m") {
        (who, letters) = ("", Some(who));
    }
    let number = fields.next();
    let mut permissions = 0;
    for letter in letters?.chars() {
        permissions |= match letter {
            'r' => 4,
            'w' => 2,
            'x' => 1,
            '-' => 0,
            _ => return None,
        };
    }
    let id = || who.parse().ok().or_else(|| number?.parse().ok());
    let (tag, id) = match (kind, who.is_empty()) {
        ("user" | "u", true) => (0x01, u32::MAX),
        ("user" | "u", false) => (0x02, id()?),
        ("group" | "g", true) => (0x04, u32::MAX),
        ("group" | "g", false) => (0x08, id()?),
        ("mask" | "m", true) => (0x10, u32::MAX),
        ("other" | "o", true) => (0x20, u32::MAX),
        _ => return None,
    };
    Some((tag, id, permissions))
}

#[cfg(test)]
mod tests {
    use super::acl_value;

    fn stored(entries: &[(u16, u16, u32)]) -> Vec<u8> {
        let mut value = 2_u32.to_le_bytes().to_vec();
        for &(tag, permissions, id) in entries {
            value.extend_from_slice(&tag.to_le_bytes());
            value.extend_from_slice(&permissions.to_le_bytes());
            value.extend_from_slice(&id.to_le_bytes());
        }
        value
    }

    #[test]
    fn lists_of_gnu_tar_libarchive_and_star() {
        let none = u32::MAX;
        let expected =
            stored(&[(1, 6, none), (2, 5, 1000), (4, 4, none), (16, 5, none), (32, 0, none)]);
        for text in [
            "user::rw-\nuser:1000:r-x\ngroup::r--\nmask::r-x\nother::---\n",
            "user::rw-,group::r--,mask::r-x,other::---,user:lisa:r-x:1000",
            "u::rw,u:1000:rx,g::r,m:rx,o:---",
            "user::rw-\nuser:1000:r-x\t#effective:r-x\ngroup::r--\nmask::r-x\nother::---",
        ] {
            assert_eq!(acl_value(text.as_bytes()), Some(expected.clone()), "{text}");
        }
        for text in
            ["", "user::rw-", "user:lisa:r-x", "user::rwz,group::r--,other::r--", "\u{fffd}"]
        {
            assert_eq!(acl_value(text.as_bytes()), None, "{text}");
        }
    }
}
