//! The numbers of users and groups that a manifest has by name.
//!
//! They are those of `etc/passwd` and `etc/group` in the directory with the contents, which is the
//! system that the names are of. The names of the host mean nothing there. Before FreeBSD makes the
//! one from the other there is only `etc/master.passwd`.

use std::collections::HashMap;

use offshoot_vfs::escape::Escaped;

use super::super::super::entry::SourceProblem;
use super::super::contents::ContentsDirectory;
use crate::Result;
use crate::copy::Original;

/// The most that a file with users or groups may hold.
const FILE_BYTES_MAX: u64 = 4 << 20;

/// What has a name and a number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum AccountType {
    User,
    Group,
}

impl AccountType {
    /// The keyword with its number.
    fn keyword(self) -> &'static str {
        match self {
            Self::User => "uid",
            Self::Group => "gid",
        }
    }

    /// The files that have its numbers.
    fn files(self) -> &'static [&'static str] {
        match self {
            Self::User => &["etc/passwd", "etc/master.passwd"],
            Self::Group => &["etc/group"],
        }
    }
}

/// Users or groups.
#[derive(Debug)]
pub(super) struct AccountNames {
    account_type: AccountType,
    numbers: HashMap<Vec<u8>, u32>,
}

impl AccountNames {
    /// Reads those of the directory with the contents, if there is one.
    pub(super) fn read(
        account_type: AccountType,
        contents: Option<&ContentsDirectory>,
    ) -> Result<Self> {
        let mut numbers = HashMap::new();
        for path in account_type.files() {
            let Some(contents) = contents else { break };
            let path = path.as_bytes();
            let Some(file) = contents.open_regular(path)? else { continue };
            let failed = |error| contents.failed(path, &error);
            let size = file.attr().size;
            if size > FILE_BYTES_MAX {
                let what = format!("a file with names has at most {} MiB", FILE_BYTES_MAX >> 20);
                return Err(SourceProblem::Refused(what).at(path));
            }
            let mut text = vec![0; usize::try_from(size).unwrap_or_default()];
            let len = file.read(0, &mut text).map_err(failed)?;
            let lines = text.get(..len).unwrap_or_default().split(|&byte| byte == b'\n');
            for (name, number) in lines.filter_map(account) {
                // The first line with a name counts, as for getpwnam.
                numbers.entry(name).or_insert(number);
            }
        }
        Ok(Self { account_type, numbers })
    }

    /// The number of `name`. Without a file that has it, root is 0, and so is the group `wheel`.
    pub(super) fn number(&self, name: &[u8]) -> Result<u32, SourceProblem> {
        if let Some(number) = self.numbers.get(name) {
            return Ok(*number);
        }
        let is_group = self.account_type == AccountType::Group;
        if name == b"root" || is_group && name == b"wheel" {
            return Ok(0);
        }
        let (key, name) = (self.account_type.keyword(), Escaped(name));
        let file = self.account_type.files().first().copied().unwrap_or_default();
        let what = format!(
            "the number of {name} is not known: give it as {key}=, or in {file} of the directory \
             with the contents"
        );
        Err(SourceProblem::Refused(what))
    }
}

/// Name and number of a line: the first and the third of its fields.
fn account(line: &[u8]) -> Option<(Vec<u8>, u32)> {
    let mut fields = line.split(|&byte| byte == b':');
    let (name, number) = (fields.next()?, fields.nth(1)?);
    let number = std::str::from_utf8(number).ok()?.parse().ok()?;
    (!name.is_empty() && !name.starts_with(b"#")).then(|| (name.to_vec(), number))
}
