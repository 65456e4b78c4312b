//! Access control lists as text.
//!
//! The volume stores a POSIX ACL as the extended attribute that the kernel shows, in the form
//! that the kernel documents (all numbers little-endian):
//!
//! ```text
//! | version 2: u32 | tag: u16 | permissions: u16 | id: u32 | tag ...
//! ```
//!
//! The archive carries that value raw like every other extended attribute, for programs
//! that restore these; and as text in a record of its own, for those that restore ACLs, as GNU tar
//! does with `--acls` and libarchive does. The text is the one that GNU tar writes: an entry on
//! each line, in the stored order, with numeric ids.
//!
//! Only an ACL that the kernel would accept has a text. Any other value is carried raw alone:
//! what it means is not ours to guess.

use std::fmt::Write;

use offshoot_vfs::FileType;

/// The largest value of an extended attribute that the kernel takes.
const VALUE_MAX: usize = 64 << 10;

/// The id that names no user and no group.
const NO_ID: u32 = u32::MAX;

/// The record that carries the ACL in the extended attribute `name` as text: key and value.
pub(super) fn acl_record(
    name: &[u8],
    value: &[u8],
    file_type: FileType,
) -> Option<(&'static [u8], String)> {
    let key: &[u8] = match (name, file_type) {
        (_, FileType::Symlink) => return None,
        (b"system.posix_acl_access", _) => b"SCHILY.acl.access",
        (b"system.posix_acl_default", FileType::Directory) => b"SCHILY.acl.default",
        _ => return None,
    };
    Some((key, text(value)?))
}

/// The tags of entries. Each is a bit, and the order of the bits is the order in which the
/// kernel takes entries.
const OWNER: u16 = 0x01;
const USER: u16 = 0x02;
const OWNING_GROUP: u16 = 0x04;
const GROUP: u16 = 0x08;
const MASK: u16 = 0x10;
const OTHER: u16 = 0x20;

/// The text of an ACL; `None` when it is not one that the kernel accepts.
fn text(value: &[u8]) -> Option<String> {
    let (version, entries) = value.split_first_chunk::<4>()?;
    let (entries, rest) = entries.as_chunks::<8>();
    if u32::from_le_bytes(*version) != 2 || !rest.is_empty() || value.len() > VALUE_MAX {
        return None;
    }
    let mut text = String::with_capacity(entries.len() * 20);
    let mut seen = 0;
    for &[tag0, tag1, perm0, perm1, id @ ..] in entries {
        let tag = u16::from_le_bytes([tag0, tag1]);
        let (word, has_id) = match tag {
            OWNER => ("user", false),
            USER => ("user", true),
            OWNING_GROUP => ("group", false),
            GROUP => ("group", true),
            MASK => ("mask", false),
            OTHER => ("other", false),
            _ => return None,
        };
        let id = Some(u32::from_le_bytes(id)).filter(|_| has_id);
        let permissions = u16::from_le_bytes([perm0, perm1]);
        // Only entries with an id may follow one of their own kind.
        let earlier = if has_id { seen & !tag } else { seen };
        if earlier >= tag || permissions > 7 || id == Some(NO_ID) {
            return None;
        }
        seen |= tag;
        let id = id.map_or(String::new(), |id| id.to_string());
        let letter = |bit, letter| if permissions & bit == 0 { '-' } else { letter };
        let (read, write, execute) = (letter(4, 'r'), letter(2, 'w'), letter(1, 'x'));
        writeln!(text, "{word}:{id}:{read}{write}{execute}").ok()?;
    }
    // Entries with an id need a mask; the owner, the owning group and the others are in every ACL.
    let needed = if seen & (USER | GROUP) == 0 { 0 } else { MASK } | OWNER | OWNING_GROUP | OTHER;
    (seen & needed == needed).then_some(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    const ACCESS: &[u8] = b"system.posix_acl_access";
    const DEFAULT: &[u8] = b"system.posix_acl_default";

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
    fn an_acl_is_written_as_tar_writes_it() {
        let value = stored(&[
            (OWNER, 6, NO_ID),
            (USER, 5, 1000),
            (USER, 4, 4_294_967_294),
            (OWNING_GROUP, 4, NO_ID),
            (GROUP, 6, 0),
            (MASK, 4, NO_ID),
            (OTHER, 1, NO_ID),
        ]);
        let expected = "user::rw-\nuser:1000:r-x\nuser:4294967294:r--\ngroup::r--\n\
                        group:0:rw-\nmask::r--\nother::--x\n";
        assert_eq!(text(&value).as_deref(), Some(expected));
        let key = |name, file_type| acl_record(name, &value, file_type).map(|(key, _)| key);
        assert_eq!(key(ACCESS, FileType::Fifo), Some(&b"SCHILY.acl.access"[..]));
        assert_eq!(key(DEFAULT, FileType::Directory), Some(&b"SCHILY.acl.default"[..]));
        // The kernel takes neither of these.
        assert_eq!(key(DEFAULT, FileType::Regular), None);
        assert_eq!(key(ACCESS, FileType::Symlink), None);
        assert_eq!(key(b"user.posix_acl_access", FileType::Regular), None);
    }

    #[test]
    fn a_mask_may_stand_without_ids_but_not_ids_without_a_mask() {
        let (owner, group, other) =
            ((OWNER, 7, NO_ID), (OWNING_GROUP, 5, NO_ID), (OTHER, 0, NO_ID));
        let mask = (MASK, 7, NO_ID);
        let taken = |entries: &[(u16, u16, u32)]| text(&stored(entries)).is_some();
        assert!(taken(&[owner, group, other]));
        assert!(taken(&[owner, group, mask, other]));
        assert!(taken(&[owner, group, (GROUP, 1, 5), (GROUP, 1, 6), mask, other]));
        assert!(!taken(&[owner, (USER, 7, 5), group, other]));
        assert!(!taken(&[owner, group, (GROUP, 7, 5), other]));
    }

    #[test]
    fn what_the_kernel_refuses_has_no_text() {
        let (owner, group, other) =
            ((OWNER, 7, NO_ID), (OWNING_GROUP, 5, NO_ID), (OTHER, 0, NO_ID));
        let mask = (MASK, 7, NO_ID);
        for entries in [
            &[][..],
            &[owner],
            &[owner, group],
            &[group, other],
            &[owner, other],
            &[owner, owner, group, other],
            &[owner, group, group, other],
            &[owner, group, other, other],
            &[owner, group, mask, mask, other],
            &[group, owner, other],
            &[owner, group, (USER, 7, 5), mask, other],
            &[owner, group, mask, (GROUP, 7, 5), other],
            &[owner, (USER, 7, NO_ID), group, mask, other],
            &[(OWNER, 8, NO_ID), group, other],
            &[owner, group, (0x40, 7, NO_ID), other],
            &[owner, group, (3, 7, NO_ID), other],
            &[owner, group, (0, 7, NO_ID), other],
        ] {
            assert_eq!(text(&stored(entries)), None, "{entries:?}");
        }
        let good = stored(&[owner, group, other]);
        for len in 0..good.len() {
            assert_eq!(text(&good[..len]), None, "cut to {len} bytes");
        }
        let version_1 = [&1_u32.to_le_bytes()[..], &good[4..]].concat();
        assert_eq!(text(&version_1), None);
        let many: Vec<_> = (0..9000).map(|id| (USER, 7, id)).collect();
        let long = [&[owner][..], &many, &[group, mask, other]].concat();
        assert_eq!(text(&stored(&long)), None);
        assert!(
            text(&stored(&[&[owner][..], &many[..8000], &[group, mask, other]].concat())).is_some()
        );
    }
}
