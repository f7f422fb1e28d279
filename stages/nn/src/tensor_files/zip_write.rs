//! Writes the zip container of PyTorch checkpoints: stored members whose contents begin at multiples of 64 bytes, as
//! PyTorch lays them out, without time stamps. The crate `zip` (9.8) aligns contents, too, but writes to what can seek, or puts
//! sizes behind the contents (16 bytes more for three members), and knows the length of a file when it is written; the tar that
//! a `.nemo` archive is has that length before it.

use std::io::Write;

/// Where contents begin, so that PyTorch may map them into memory.
const ALIGNMENT: u64 = 64;
const LOCAL_HEADER: u64 = 30;
/// Values of this size and more need zip64's fields.
const LIMIT: u64 = 0xffff_ffff;

/// A member to be written.
pub struct NewMember {
    pub name: String,
    pub length: u64,
}

struct Placed {
    member: NewMember,
    /// Of the local header.
    offset: u64,
    /// Bytes of the extra field that puts the contents where they belong.
    padding: u64,
    wide: bool,
}

/// The places of all members of a zip file.
pub struct ZipLayout {
    members: Vec<Placed>,
    directory: u64,
    limit: u64,
}

impl ZipLayout {
    pub fn new(members: Vec<NewMember>) -> Self {
        Self::with_limit(members, LIMIT)
    }

    /// `limit` represents 4 GiB in tests.
    fn with_limit(members: Vec<NewMember>, limit: u64) -> Self {
        let mut at = 0;
        let members = members
            .into_iter()
            .map(|member| {
                let (offset, wide) = (at, member.length >= limit);
                // An extra field has a head of 4 bytes; two 64-bit sizes where they are needed.
                let fixed = offset + LOCAL_HEADER + member.name.len() as u64 + if wide { 20 } else { 0 } + 4;
                let padding = fixed.next_multiple_of(ALIGNMENT) - fixed;
                at = fixed + padding + member.length;
                Placed {
                    member,
                    offset,
                    padding,
                    wide,
                }
            })
            .collect();
        ZipLayout {
            members,
            directory: at,
            limit,
        }
    }

    /// Length of the whole file.
    pub fn length(&self) -> u64 {
        let entries: u64 = self
            .members
            .iter()
            .map(|placed| 46 + placed.member.name.len() as u64 + self.directory_extra(placed).len() as u64)
            .sum();
        let wide = if self.needs_wide_end(entries) { 56 + 20 } else { 0 };
        self.directory + entries + wide + 22
    }

    fn needs_wide_end(&self, directory_size: u64) -> bool {
        self.members.len() >= 0xffff || self.directory >= self.limit || directory_size >= self.limit
    }

    fn directory_extra(&self, placed: &Placed) -> Vec<u8> {
        let mut values = Vec::new();
        if placed.wide {
            values.extend(placed.member.length.to_le_bytes());
            values.extend(placed.member.length.to_le_bytes());
        }
        if placed.offset >= self.limit {
            values.extend(placed.offset.to_le_bytes());
        }
        if values.is_empty() {
            return values;
        }
        let mut extra = vec![1, 0];
        extra.extend((values.len() as u16).to_le_bytes());
        extra.extend(values);
        extra
    }

    /// Writes the file, asking for each member's bytes when its turn comes. They must be as many as were announced.
    pub fn write<E: From<std::io::Error>>(
        &self,
        out: &mut dyn Write,
        mut contents: impl FnMut(usize) -> Result<Vec<u8>, E>,
    ) -> Result<(), E> {
        let mut directory = Vec::new();
        for (index, placed) in self.members.iter().enumerate() {
            let (member, bytes) = (&placed.member, contents(index)?);
            if bytes.len() as u64 != member.length {
                return Err(std::io::Error::other(format!(
                    "member `{}` has {} bytes instead of {}",
                    member.name,
                    bytes.len(),
                    member.length
                ))
                .into());
            }
            let mut checksum = flate2::Crc::new();
            checksum.update(&bytes);
            let checksum = checksum.sum();
            // Version 4.5 knows zip64; no flags, stored, no time.
            let version: u16 = if placed.wide { 45 } else { 20 };
            let size = if placed.wide { u32::MAX } else { member.length as u32 };
            let common = |out: &mut Vec<u8>, extra: usize| {
                for value in [version, 0, 0, 0, 0] {
                    out.extend(value.to_le_bytes());
                }
                for value in [checksum, size, size] {
                    out.extend(value.to_le_bytes());
                }
                out.extend((member.name.len() as u16).to_le_bytes());
                out.extend((extra as u16).to_le_bytes());
            };
            let mut extra = Vec::new();
            if placed.wide {
                extra.extend([1, 0, 16, 0]);
                extra.extend(member.length.to_le_bytes());
                extra.extend(member.length.to_le_bytes());
            }
            // PyTorch's own name for its padding.
            extra.extend(*b"FB");
            extra.extend((placed.padding as u16).to_le_bytes());
            extra.resize(extra.len() + placed.padding as usize, b'Z');
            let mut header = b"PK\x03\x04".to_vec();
            common(&mut header, extra.len());
            header.extend(member.name.as_bytes());
            header.extend(extra);
            out.write_all(&header)?;
            out.write_all(&bytes)?;

            let extra = self.directory_extra(placed);
            directory.extend(*b"PK\x01\x02");
            directory.extend(version.to_le_bytes());
            common(&mut directory, extra.len());
            // No comment, first disk, no attributes.
            directory.extend([0; 10]);
            let offset = if placed.offset >= self.limit {
                u32::MAX
            } else {
                placed.offset as u32
            };
            directory.extend(offset.to_le_bytes());
            directory.extend(member.name.as_bytes());
            directory.extend(extra);
        }
        out.write_all(&directory)?;
        self.write_end(out, directory.len() as u64)?;
        Ok(())
    }

    fn write_end(&self, out: &mut dyn Write, size: u64) -> std::io::Result<()> {
        let count = self.members.len() as u64;
        let mut end = Vec::new();
        let wide = self.needs_wide_end(size);
        if wide {
            end.extend(*b"PK\x06\x06");
            end.extend(44u64.to_le_bytes());
            end.extend([45, 0, 45, 0]);
            end.extend([0; 8]);
            for value in [count, count, size, self.directory] {
                end.extend(value.to_le_bytes());
            }
            end.extend(*b"PK\x06\x07");
            end.extend([0; 4]);
            end.extend((self.directory + size).to_le_bytes());
            end.extend(1u32.to_le_bytes());
        }
        end.extend(*b"PK\x05\x06");
        end.extend([0; 4]);
        let count = if wide { u16::MAX } else { count as u16 };
        end.extend(count.to_le_bytes());
        end.extend(count.to_le_bytes());
        for value in [size, self.directory] {
            end.extend(if wide { u32::MAX } else { value as u32 }.to_le_bytes());
        }
        end.extend([0; 2]);
        out.write_all(&end)
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::super::zip::{Region, members};
    use super::*;

    /// What is written is read again, also where everything is past the limit and so in zip64's fields.
    #[test]
    fn zip_files_are_read_again() {
        let contents: Vec<Vec<u8>> = vec![b"one".to_vec(), Vec::new(), vec![7; 1000], b"x".to_vec()];
        for limit in [LIMIT, 500, 2, 0] {
            let planned = contents.iter().enumerate().map(|(index, bytes)| NewMember {
                name: format!("root/data/{index}"),
                length: bytes.len() as u64,
            });
            let layout = ZipLayout::with_limit(planned.collect(), limit);
            let mut written = Vec::new();
            layout
                .write(&mut written, |index| Ok::<_, std::io::Error>(contents[index].clone()))
                .unwrap();
            assert_eq!(written.len() as u64, layout.length(), "limit {limit}");
            let mut file = tempfile::tempfile().unwrap();
            file.write_all(&written).unwrap();
            let region = Region {
                file: &file,
                start: 0,
                length: written.len() as u64,
            };
            let found = members(&region).unwrap();
            assert_eq!(found.len(), contents.len());
            for (index, bytes) in contents.iter().enumerate() {
                let member = found[&format!("root/data/{index}")];
                assert_eq!(member.offset % ALIGNMENT, 0);
                assert_eq!(&region.read(member.offset, member.length).unwrap(), bytes);
            }
        }
    }
}
