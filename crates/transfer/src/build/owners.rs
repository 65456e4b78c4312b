//! Owners that become others: `--map-uid` and `--map-gid`.
//!
//! Ranges of numbers are mapped, as those of a user namespace; a number outside of all of them
//! stays what it is. What names users or groups elsewhere follows: access control lists, and the
//! user for whom capabilities count.

use offshoot_vfs::acl::{ACCESS, DEFAULT, GROUP, USER};

use super::entry::BuildEntry;

/// The extended attribute with the capabilities of a file.
const CAPABILITY: &[u8] = b"security.capability";

/// Version 3 of capabilities, in the uppermost byte of the first number. It names a user at 20.
const CAPABILITY_VERSION: u8 = 3;
const CAPABILITY_USER_AT: usize = 20;

/// Numbers that become others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct MappedRange {
    from: u32,
    to: u32,
    count: u32,
}

/// Ranges of numbers of users, or of groups, and what they become.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct OwnerMap(Vec<MappedRange>);

impl OwnerMap {
    /// Adds a range: `from` and the next numbers, `count` in all, become `to` and the next ones.
    ///
    /// # Errors
    /// What is wrong with the range, in words.
    pub fn add(&mut self, from: u32, to: u32, count: u32) -> Result<(), String> {
        // The last number stands for none.
        let fits = |start: u32| start.checked_add(count).is_some();
        if count == 0 || !fits(from) || !fits(to) {
            return Err(format!("{from}:{to}:{count} is no range of numbers"));
        }
        let is_twice =
            |range: &&MappedRange| from < range.from + range.count && range.from < from + count;
        if let Some(MappedRange { from: other, .. }) = self.0.iter().find(is_twice) {
            return Err(format!("the ranges from {from} and from {other} have numbers in common"));
        }
        self.0.push(MappedRange { from, to, count });
        Ok(())
    }

    /// What a number becomes.
    #[must_use]
    pub fn mapped(&self, id: u32) -> u32 {
        let of = |range: &MappedRange| {
            let offset = id.checked_sub(range.from).filter(|offset| *offset < range.count)?;
            Some(range.to + offset)
        };
        self.0.iter().find_map(of).unwrap_or(id)
    }

    fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

/// Maps the owner of a file, and those in its attributes.
pub(super) fn map_owners(entry: &mut BuildEntry, users: &OwnerMap, groups: &OwnerMap) {
    if users.is_empty() && groups.is_empty() {
        return;
    }
    (entry.uid, entry.gid) = (users.mapped(entry.uid), groups.mapped(entry.gid));
    for (name, value) in &mut entry.xattrs {
        if name == ACCESS || name == DEFAULT {
            map_list(value, users, groups);
        } else if name == CAPABILITY {
            map_capability(value, users);
        }
    }
}

/// Maps the entries of an access control list: of each tag, permissions and number.
fn map_list(value: &mut [u8], users: &OwnerMap, groups: &OwnerMap) {
    let Some((_version, entries)) = value.split_at_mut_checked(4) else { return };
    let (entries, _) = entries.as_chunks_mut::<8>();
    for [tag_low, tag_high, _, _, id @ ..] in entries {
        let map = match u16::from_le_bytes([*tag_low, *tag_high]) {
            USER => users,
            GROUP => groups,
            _ => continue,
        };
        *id = map.mapped(u32::from_le_bytes(*id)).to_le_bytes();
    }
}

/// Maps the user in whose namespace capabilities count.
fn map_capability(value: &mut [u8], users: &OwnerMap) {
    if value.get(3) != Some(&CAPABILITY_VERSION) {
        return;
    }
    let user = value.get_mut(CAPABILITY_USER_AT..).and_then(|rest| rest.first_chunk_mut::<4>());
    if let Some(user) = user {
        *user = users.mapped(u32::from_le_bytes(*user)).to_le_bytes();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_are_mapped_and_the_rest_stays() {
        let mut map = OwnerMap::default();
        map.add(0, 100_000, 1000).expect("a range");
        map.add(1000, 7, 1).expect("a range");
        for (id, mapped) in [(0, 100_000), (999, 100_999), (1000, 7), (1001, 1001), (7, 100_007)] {
            assert_eq!(map.mapped(id), mapped, "{id}");
        }
        for (from, to, count) in
            [(5, 5, 0), (u32::MAX, 0, 1), (1, u32::MAX - 4, 5), (999, 0, 1), (900, 0, 200)]
        {
            map.add(from, to, count).expect_err("it is refused");
        }
        map.add(2000, u32::MAX - 5, 5).expect("the last numbers");
        assert_eq!(map.mapped(2004), u32::MAX - 1);
    }

    #[test]
    fn lists_and_capabilities_follow() {
        let mut map = OwnerMap::default();
        map.add(1, 11, 5).expect("a range");
        let none = u32::MAX;
        let list = |user, group| {
            offshoot_vfs::acl::value_of([
                (1, 6, none),
                (USER, 5, user),
                (4, 4, none),
                (GROUP, 4, group),
                (16, 5, none),
                (32, 0, none),
            ])
        };
        let mut value = list(2, 3);
        map_list(&mut value, &map, &OwnerMap::default());
        assert_eq!(value, list(12, 3));
        map_list(&mut value, &OwnerMap::default(), &map);
        assert_eq!(value, list(12, 13));
        let capability = |version: u8, user: u8| {
            let mut value = vec![0; 24];
            (value[3], value[20]) = (version, user);
            value
        };
        for (version, mapped) in [(2, 4), (3, 14)] {
            let mut value = capability(version, 4);
            map_capability(&mut value, &map);
            assert_eq!(value, capability(version, mapped));
        }
    }
}
