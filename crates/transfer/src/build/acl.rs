//! Access control lists that an archive has as text, as [`offshoot_vfs::acl`] has them.
//!
//! Entries are separated by commas or line ends: `user::rw-,user:1000:r--,mask::rw-,...`. GNU tar
//! writes names or numbers of users; libarchive writes names, and behind the permissions the
//! number. What only has a name means nothing in a volume.

use offshoot_vfs::acl::{Acl, GROUP, GROUP_OBJ, MASK, NO_ID, OTHER, USER, USER_OBJ, value_of};

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
    let value = value_of(entries.into_iter().map(|(tag, id, permissions)| (tag, permissions, id)));
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
        ("user" | "u", true) => (USER_OBJ, NO_ID),
        ("user" | "u", false) => (USER, id()?),
        ("group" | "g", true) => (GROUP_OBJ, NO_ID),
        ("group" | "g", false) => (GROUP, id()?),
        ("mask" | "m", true) => (MASK, NO_ID),
        ("other" | "o", true) => (OTHER, NO_ID),
        _ => return None,
    };
    Some((tag, id, permissions))
}

#[cfg(test)]
mod tests {
    use offshoot_vfs::acl::value_of;

    use super::acl_value;

    #[test]
    fn lists_of_gnu_tar_libarchive_and_star() {
        let none = u32::MAX;
        let expected =
            value_of([(1, 6, none), (2, 5, 1000), (4, 4, none), (16, 5, none), (32, 0, none)]);
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
