//! Access control lists as text.
//!
//! The archive carries the extended attribute that a list is ([`offshoot_vfs::acl`]) raw like every
//! other, for programs that restore these; and as text in a record of its own, for those that
//! restore lists, as GNU tar does with `--acls` and libarchive does. The text is the one that GNU
//! tar writes: an entry on each line, in the stored order, with numeric ids.
//!
//! Only an ACL that the kernel would accept has a text. Any other value is carried raw alone:
//! what it means is not ours to guess.

use std::fmt::Write;

use offshoot_vfs::FileType;
use offshoot_vfs::acl::{ACCESS, Acl, DEFAULT, GROUP, GROUP_OBJ, MASK, USER, USER_OBJ};

/// The largest value of an extended attribute that the kernel takes.
const VALUE_MAX: usize = 64 << 10;

/// The record that carries the ACL in the extended attribute `name` as text: key and value.
pub(super) fn acl_record(
    name: &[u8],
    value: &[u8],
    file_type: FileType,
) -> Option<(&'static [u8], String)> {
    let key: &[u8] = match (name, file_type) {
        (_, FileType::Symlink) => return None,
        (ACCESS, _) => b"SCHILY.acl.access",
        (DEFAULT, FileType::Directory) => b"SCHILY.acl.default",
        _ => return None,
    };
    Some((key, text(value)?))
}

/// The text of an ACL; `None` when it is not one that the kernel accepts.
fn text(value: &[u8]) -> Option<String> {
    if value.len() > VALUE_MAX {
        return None;
    }
    let list = Acl::parse(value).ok().flatten()?;
    let mut text = String::with_capacity(value.len() * 3);
    for (tag, permissions, id) in list.entries() {
        let word = match tag {
            USER_OBJ | USER => "user",
            GROUP_OBJ | GROUP => "group",
            MASK => "mask",
            _ => "other",
        };
        let id = if matches!(tag, USER | GROUP) { id.to_string() } else { String::new() };
        let letter = |bit, letter| if permissions & bit == 0 { '-' } else { letter };
        let (read, write, execute) = (letter(4, 'r'), letter(2, 'w'), letter(1, 'x'));
        writeln!(text, "{word}:{id}:{read}{write}{execute}").ok()?;
    }
    Some(text)
}

#[cfg(test)]
mod tests {
    use offshoot_vfs::acl::{NO_ID, OTHER, value_of};

    use super::*;

    fn stored(entries: &[(u16, u16, u32)]) -> Vec<u8> {
        value_of(entries.iter().copied())
    }

    #[test]
    fn an_acl_is_written_as_tar_writes_it() {
        let value = stored(&[
            (USER_OBJ, 6, NO_ID),
            (USER, 5, 1000),
            (USER, 4, 4_294_967_294),
            (GROUP_OBJ, 4, NO_ID),
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
            ((USER_OBJ, 7, NO_ID), (GROUP_OBJ, 5, NO_ID), (OTHER, 0, NO_ID));
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
            ((USER_OBJ, 7, NO_ID), (GROUP_OBJ, 5, NO_ID), (OTHER, 0, NO_ID));
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
            &[(USER_OBJ, 8, NO_ID), group, other],
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
