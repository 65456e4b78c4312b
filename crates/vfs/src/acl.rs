//! POSIX access control lists, in the form in which system calls carry them.
//!
//! A list is the value of one of two extended attributes: [`ACCESS`] says which users may do what
//! with a file, and [`DEFAULT`], of directories alone, what the files begin with that are made in
//! it. The value is a version, 2, and entries of eight bytes: tag, permissions and id,
//! little-endian (`linux/posix_acl_xattr.h`). What lists mean is in POSIX 1003.1e, draft 17, and in
//! `acl(5)`.
//!
//! A list and the permissions of its file are tied together: the group bits of a file that has
//! entries for single users or groups are the mask of its list. Here are the three rules of that.
//! The caller checks who may change a list.

use crate::{Errno, Error, Result};

/// The extended attribute with the list of a file.
pub const ACCESS: &[u8] = b"system.posix_acl_access";

/// The extended attribute with the list that new files in a directory get.
pub const DEFAULT: &[u8] = b"system.posix_acl_default";

const VERSION: [u8; 4] = [2, 0, 0, 0];

/// The tag of the entry of the owner.
pub const USER_OBJ: u16 = 0x01;
/// The tag of the entry of a single user, whose id it has.
pub const USER: u16 = 0x02;
/// The tag of the entry of the owning group.
pub const GROUP_OBJ: u16 = 0x04;
/// The tag of the entry of a single group, whose id it has.
pub const GROUP: u16 = 0x08;
/// The tag of the entry that bounds those of groups and of single users.
pub const MASK: u16 = 0x10;
/// The tag of the entry of all others.
pub const OTHER: u16 = 0x20;

/// The id of entries that are for no single user and for no single group.
pub const NO_ID: u32 = u32::MAX;

/// The value of an attribute with these entries in this order: of each its tag, its permissions and
/// its id. Nothing is proved of them.
#[must_use]
pub fn value_of(entries: impl IntoIterator<Item = (u16, u16, u32)>) -> Vec<u8> {
    let mut value = VERSION.to_vec();
    for (tag, permissions, id) in entries {
        value.extend_from_slice(&tag.to_le_bytes());
        value.extend_from_slice(&permissions.to_le_bytes());
        value.extend_from_slice(&id.to_le_bytes());
    }
    value
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct PosixAclEntry {
    tag: u16,
    permissions: u16,
    id: u32,
}

/// The user of a call.
pub struct Accessor<'a> {
    /// The user.
    pub uid: u32,
    /// Whether the user is in a group.
    pub is_member: &'a dyn Fn(u32) -> bool,
}

/// A list.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Acl {
    entries: Vec<PosixAclEntry>,
}

impl Acl {
    /// The list in the value of an attribute; `None` for one without entries, which means that
    /// there is none.
    ///
    /// # Errors
    /// `EOPNOTSUPP` for another version. `EINVAL` for what is no list, for entries out of their
    /// order, for one of owner, group and others that is missing, and for single users or groups
    /// without a mask.
    pub fn parse(value: &[u8]) -> Result<Option<Self>> {
        let invalid = || Error::posix(Errno::INVAL, "an access control list");
        if value.is_empty() {
            return Ok(None);
        }
        let (version, rest) = value.split_first_chunk::<4>().ok_or_else(invalid)?;
        if *version != VERSION {
            return Err(Error::posix(Errno::OPNOTSUPP, "this version of access control lists"));
        }
        let (chunks, []) = rest.as_chunks::<8>() else { return Err(invalid()) };
        let entries: Vec<_> = chunks
            .iter()
            .map(|&[a, b, c, d, e, f, g, h]| PosixAclEntry {
                tag: u16::from_le_bytes([a, b]),
                permissions: u16::from_le_bytes([c, d]),
                id: u32::from_le_bytes([e, f, g, h]),
            })
            .collect();
        let list = Self { entries };
        if list.entries.is_empty() {
            return Ok(None);
        }
        if list.is_valid() { Ok(Some(list)) } else { Err(invalid()) }
    }

    fn is_valid(&self) -> bool {
        let of = |tag| self.entries.iter().filter(move |entry| entry.tag == tag).count();
        let is_extended = of(USER) + of(GROUP) > 0;
        [USER_OBJ, GROUP_OBJ, OTHER].into_iter().all(|tag| of(tag) == 1)
            && of(MASK) <= 1
            && (of(MASK) == 1 || !is_extended)
            && self.entries.is_sorted_by_key(|entry| entry.tag)
            && self.entries.iter().all(|entry| {
                let is_known =
                    matches!(entry.tag, USER_OBJ | USER | GROUP_OBJ | GROUP | MASK | OTHER);
                let names_one = matches!(entry.tag, USER | GROUP);
                is_known && entry.permissions <= 7 && (!names_one || entry.id != NO_ID)
            })
    }

    /// The entries in their order: of each its tag, its permissions and its id.
    pub fn entries(&self) -> impl Iterator<Item = (u16, u16, u32)> {
        self.entries.iter().map(|entry| (entry.tag, entry.permissions, entry.id))
    }

    /// The list as the value of an attribute.
    #[must_use]
    pub fn to_value(&self) -> Vec<u8> {
        value_of(self.entries())
    }

    /// Whether the list says more than permissions can.
    #[must_use]
    pub fn is_extended(&self) -> bool {
        self.entries.iter().any(|entry| matches!(entry.tag, USER | GROUP | MASK))
    }

    /// Whether the list lets a user have all of the rights `wanted`: four to read, two to write,
    /// one to search or execute. `uid` and `gid` are those of the file.
    #[must_use]
    pub fn allows(&self, accessor: &Accessor<'_>, uid: u32, gid: u32, wanted: u32) -> bool {
        let of = |tag| self.entries.iter().filter(move |entry| entry.tag == tag);
        let mask = of(MASK).next().map_or(7, |entry| entry.permissions);
        let has = |permissions: u16| u32::from(permissions) & wanted == wanted;
        if accessor.uid == uid {
            return of(USER_OBJ).any(|entry| has(entry.permissions));
        }
        if let Some(entry) = of(USER).find(|entry| entry.id == accessor.uid) {
            return has(entry.permissions & mask);
        }
        let own = of(GROUP_OBJ).filter(|_| (accessor.is_member)(gid));
        let named = of(GROUP).filter(|entry| (accessor.is_member)(entry.id));
        let mut groups = own.chain(named).peekable();
        // One group with all of the rights is enough, and others get what is left only without any.
        if groups.peek().is_some() {
            return groups.any(|entry| has(entry.permissions & mask));
        }
        of(OTHER).any(|entry| has(entry.permissions))
    }

    /// The entries that the permissions of the file stand for, each with how far left its bits
    /// stand there.
    fn classes(&mut self) -> impl Iterator<Item = (&mut PosixAclEntry, u32)> {
        let group =
            if self.entries.iter().any(|entry| entry.tag == MASK) { MASK } else { GROUP_OBJ };
        self.entries.iter_mut().filter_map(move |entry| match entry.tag {
            USER_OBJ => Some((entry, 6)),
            tag if tag == group => Some((entry, 3)),
            OTHER => Some((entry, 0)),
            _ => None,
        })
    }

    /// The permissions, with what stands above the lowest nine bits as it is, of a file that gets
    /// this list.
    #[must_use]
    pub fn permissions(&self, permissions: u32) -> u32 {
        let mut list = self.clone();
        let bits = list.classes().map(|(entry, shift)| u32::from(entry.permissions) << shift);
        permissions & !0o777 | bits.sum::<u32>()
    }

    /// The permissions of the file that has this list become these.
    pub fn set_permissions(&mut self, permissions: u32) {
        for (entry, shift) in self.classes() {
            entry.permissions = class(permissions, shift);
        }
    }

    /// A file is made with these permissions in a directory whose default list this is: the list
    /// and the permissions become what both allow.
    pub fn create_with(&mut self, permissions: &mut u32) {
        for (entry, shift) in self.classes() {
            entry.permissions &= class(*permissions, shift);
        }
        *permissions = self.permissions(*permissions);
    }
}

/// Three bits of permissions.
fn class(permissions: u32, shift: u32) -> u16 {
    u16::try_from(permissions >> shift & 7).expect("three bits")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn list(entries: &[(u16, u16, u32)]) -> Vec<u8> {
        value_of(entries.iter().copied())
    }

    fn parse(entries: &[(u16, u16, u32)]) -> Result<Option<Acl>> {
        Acl::parse(&list(entries))
    }

    const NONE: u32 = NO_ID;
    const PLAIN: [(u16, u16, u32); 3] =
        [(USER_OBJ, 6, NONE), (GROUP_OBJ, 4, NONE), (OTHER, 0, NONE)];
    const EXTENDED: [(u16, u16, u32); 5] = [
        (USER_OBJ, 7, NONE),
        (USER, 5, 1000),
        (GROUP_OBJ, 7, NONE),
        (MASK, 5, NONE),
        (OTHER, 1, NONE),
    ];

    #[test]
    fn what_is_no_list_is_refused() {
        let errno = |value: &[u8]| Acl::parse(value).map(drop).map_err(|error| error.errno());
        assert_eq!(Acl::parse(b"").ok(), Some(None));
        assert_eq!(Acl::parse(&VERSION).ok(), Some(None));
        assert_eq!(errno(&[1, 0, 0, 0]), Err(Errno::OPNOTSUPP));
        assert_eq!(errno(&[2, 0]), Err(Errno::INVAL));
        assert_eq!(errno(&[&list(&PLAIN)[..], &[0]].concat()), Err(Errno::INVAL));
        for bad in [
            &PLAIN[..2],
            &[PLAIN[0], PLAIN[0], PLAIN[1], PLAIN[2]],
            &[PLAIN[1], PLAIN[0], PLAIN[2]],
            &[PLAIN[0], (USER, 7, 1), PLAIN[1], PLAIN[2]],
            &[PLAIN[0], (USER, 7, NONE), PLAIN[1], (MASK, 7, NONE), PLAIN[2]],
            &[(USER_OBJ, 8, NONE), PLAIN[1], PLAIN[2]],
            &[PLAIN[0], PLAIN[1], PLAIN[2], (0x40, 0, NONE)],
        ] {
            assert_eq!(errno(&list(bad)), Err(Errno::INVAL), "{bad:?}");
        }
    }

    #[test]
    fn permissions_and_list_say_the_same() {
        let plain = parse(&PLAIN).expect("a list").expect("with entries");
        assert!(!plain.is_extended());
        assert_eq!(plain.permissions(0o7777), 0o7640);
        let mut extended = parse(&EXTENDED).expect("a list").expect("with entries");
        assert!(extended.is_extended());
        assert_eq!(extended.permissions(0o4000), 0o4751);
        extended.set_permissions(0o1624);
        assert_eq!(extended.permissions(0), 0o624);
        assert_eq!(extended.entries[2].permissions, 7, "the owning group keeps its own");
    }

    #[test]
    fn one_entry_decides_and_groups_together() {
        let list = parse(&[
            (USER_OBJ, 7, NONE),
            (USER, 7, 1000),
            (USER, 0, 1001),
            (GROUP_OBJ, 4, NONE),
            (GROUP, 3, 50),
            (GROUP, 2, 51),
            (MASK, 6, NONE),
            (OTHER, 7, NONE),
        ]);
        let list = list.expect("a list").expect("with entries");
        let allows = |uid: u32, groups: &[u32], wanted| {
            let is_member = |gid| groups.contains(&gid);
            list.allows(&Accessor { uid, is_member: &is_member }, 5, 6, wanted)
        };
        assert!(allows(5, &[], 7), "the mask is not for the owner");
        assert!(allows(1000, &[], 6) && !allows(1000, &[], 1), "the mask is for single users");
        assert!(!allows(1001, &[50], 2), "the entry of the user comes first");
        assert!(allows(9, &[6], 4) && !allows(9, &[6], 2));
        assert!(allows(9, &[6, 50], 2) && !allows(9, &[50], 1));
        assert!(!allows(9, &[6, 51], 6), "no group has both");
        assert!(allows(9, &[7], 7));
    }

    #[test]
    fn a_new_file_may_what_both_allow() {
        let mut extended = parse(&EXTENDED).expect("a list").expect("with entries");
        let mut permissions = 0o2666;
        extended.create_with(&mut permissions);
        assert_eq!(permissions, 0o2640);
        assert_eq!(extended.permissions(0), 0o640);
    }
}
